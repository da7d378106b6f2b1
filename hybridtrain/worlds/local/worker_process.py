"""One worker process, as its parent knows it."""

from __future__ import annotations

import os
import selectors
import signal
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

from hybridtrain.monitoring.heartbeat import Doing, Heartbeat, heartbeat_file
from hybridtrain.protocol.messages import (
    Answer,
    Average,
    Begin,
    Gather,
    Install,
    Push,
    Reply,
    Request,
    Share,
    Stop,
)
from hybridtrain.worlds.local.channel import Channel, ChannelClosed


@dataclass
class WorkerProcess:
    """A process that does the work of one worker; another may take its place.

    ``number``: of the worker; ``sentinel``: readable once the process has ended; ``gone``: it has
    been reaped; ``mourned``: the server has been told what follows, though it may not have ended
    yet; ``cause``: why the parent has killed it; ``request``: what it waits to be answered;
    ``heard``: how many messages have come from it.
    """

    number: int
    channel: Channel
    process: BaseProcess
    sentinel: int
    heartbeat: Heartbeat
    place: str = ""
    result: Any = None
    gone: bool = False
    mourned: bool = False
    cause: str = ""
    request: Request | None = None
    heard: int = 0
    closed: bool = False
    _selector: selectors.BaseSelector | None = None
    _room: int | None = None  # a descriptor that says when there is room to send the rest

    @classmethod
    def of(cls, number: int, channel: Channel, process: BaseProcess, place: str) -> WorkerProcess:
        """The process has just been started; ``place``: the device it computes on.

        Raises:
            OSError: if there are no descriptors left.
        """
        heartbeat = heartbeat_file()
        with suppress(OSError):  # it has ended already: the sentinel will tell
            channel.give_bells(heartbeat)
        return cls(number, channel, process, _sentinel(process), Heartbeat(heartbeat), place)

    # ---- messages -------------------------------------------------------------------------------

    def attend(self, selector: selectors.BaseSelector) -> None:
        """Have the selector tell of messages, of the end, and of room for what is to be sent."""
        self._selector = selector
        selector.register(self.channel, selectors.EVENT_READ, ("message", self))
        selector.register(self.sentinel, selectors.EVENT_READ, ("exit", self))

    def send(self, reply: Reply, fd: int | None = None) -> None:
        """Send it, as far as there is room; ``make_room`` sends the rest, then."""
        if isinstance(reply, Answer) or (isinstance(reply, Stop) and reply.now):
            self.request = None  # what comes unasked leaves it waiting
        with suppress(ChannelClosed):  # the sentinel will tell
            if not self.channel.post(reply, fd) and self._room is None and self._selector:
                self._room = os.dup(self.channel.sink)  # the other one is watched for messages
                self._selector.register(self._room, selectors.EVENT_WRITE, ("room", self))

    def make_room(self) -> None:
        """There is some: send what is kept."""
        try:
            done = self.channel.flush()
        except ChannelClosed:
            done = True
        if done:
            self.ignore_room()

    def ignore_room(self) -> None:
        """Nothing is to be sent any more, for now."""
        if self._room is not None and self._selector is not None:
            self._selector.unregister(self._room)
            os.close(self._room)
            self._room = None

    # ---- for the watchdog -----------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """Of the process."""
        return self.process.pid or 0

    @property
    def asked(self) -> str:
        """What it waits for, in words; empty if it does not wait."""
        match self.request:
            case None:
                return ""
            case Gather(tag):
                return f"all in '{tag}'"
            case Share() | Install():
                return "all to begin"
            case Push():
                return "its release"
            case Begin():
                return "its turn"
            case Average():
                return "the mean of all gradients"
        return "an answer"

    # ---- the end --------------------------------------------------------------------------------

    def kill(self, cause: str = "") -> None:
        """At once, whatever it does; ``cause`` is what the obituary will say."""
        self.cause = self.cause or cause
        if not self.gone:
            self.process.kill()

    def bury(self) -> None:
        """The process has ended."""
        self.process.join()
        self.gone = True
        self.request = None
        self.ignore_room()

    def close(self) -> None:
        """Give all descriptors back; once is enough."""
        if self.closed:
            return
        self.closed = True
        self.ignore_room()
        self.heartbeat.close()
        if self.sentinel != self.process.sentinel:
            os.close(self.sentinel)
        self.channel.close()
        self.process.close()

    def obituary(self) -> str:
        """How it ended, though it did not say so itself."""
        who = f"worker {self.number} (process {self.process.pid})"
        if self.cause:
            return f"{who} {self.cause}"
        code = self.process.exitcode or 0
        if code >= 0:
            return f"{who} exited with code {code}, {self.where()}"
        hint = "; the system may have run out of memory" if code == -signal.SIGKILL else ""
        return f"{who} was killed by {signal.Signals(-code).name}, {self.where()}{hint}"

    def aftermath(self) -> str:
        """What the others cannot make good."""
        if self.heartbeat.doing != Doing.EVALUATION:
            return ""
        return ", and its samples are missing from the metrics of this evaluation"

    def where(self) -> str:
        """What it did last, and on which device."""
        return f"{self.heartbeat.where}, on {self.place}" if self.place else self.heartbeat.where


def _sentinel(process: BaseProcess) -> int:
    """A descriptor that says at once when the process ends.

    ``process.sentinel`` is a pipe, which the process' own children (a data loader's) keep open.
    """
    try:
        return os.pidfd_open(process.pid or 0)
    except (AttributeError, OSError):  # not Linux, an old one, or ended already
        return process.sentinel
