"""The parent's handle on a worker process."""

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
    """The process of one worker; a restarted worker has a new one.

    ``number``: of the worker; ``sentinel``: readable once the process has ended; ``gone``: the
    process has been reaped; ``mourned``: the server knows of the loss (the process may still run);
    ``cause``: why the parent has killed it; ``request``: its unanswered message; ``heard``: number
    of its messages.
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
    _room: int | None = None  # a descriptor to watch for writability

    @classmethod
    def of(cls, number: int, channel: Channel, process: BaseProcess, place: str) -> WorkerProcess:
        """Wrap a process just started; ``place``: its device, in words.

        Raises:
            OSError: if there are no descriptors left.
        """
        heartbeat = heartbeat_file()
        with suppress(OSError):  # it has ended already, which the sentinel reports
            channel.give_bells(heartbeat)
        return cls(number, channel, process, _sentinel(process), Heartbeat(heartbeat), place)

    # ---- messages -------------------------------------------------------------------------------

    def attend(self, selector: selectors.BaseSelector) -> None:
        """Register with the selector: for messages, the end, and room for queued messages."""
        self._selector = selector
        selector.register(self.channel, selectors.EVENT_READ, ("message", self))
        selector.register(self.sentinel, selectors.EVENT_READ, ("exit", self))

    def send(self, reply: Reply, fd: int | None = None) -> None:
        """Send without blocking; ``make_room`` sends the rest later."""
        if isinstance(reply, Answer) or (isinstance(reply, Stop) and reply.now):
            self.request = None  # other replies leave it waiting
        with suppress(ChannelClosed):  # which the sentinel reports
            if not self.channel.post(reply, fd) and self._room is None and self._selector:
                # A copy: the original may be watched for messages.
                self._room = os.dup(self.channel.sock.fileno())
                self._selector.register(self._room, selectors.EVENT_WRITE, ("room", self))

    def make_room(self) -> None:
        """The socket is writable: send queued messages."""
        try:
            done = self.channel.flush()
        except ChannelClosed:
            done = True
        if done:
            self.ignore_room()

    def ignore_room(self) -> None:
        """Stop watching for room."""
        if self._room is not None and self._selector is not None:
            self._selector.unregister(self._room)
            os.close(self._room)
            self._room = None

    # ---- for the watchdog -----------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """The process number."""
        return self.process.pid or 0

    @property
    def asked(self) -> str:
        """The answer that the worker waits for, in words; empty if none."""
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
        """Kill the process; ``cause``: for the obituary."""
        self.cause = self.cause or cause
        if not self.gone:
            self.process.kill()

    def bury(self) -> None:
        """Reap the process, which has ended."""
        self.process.join()
        self.gone = True
        self.request = None
        self.ignore_room()

    def close(self) -> None:
        """Close all descriptors; may be called twice."""
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
        """How the process ended, if it sent no report."""
        who = f"worker {self.number} (process {self.process.pid})"
        if self.cause:
            return f"{who} {self.cause}"
        code = self.process.exitcode or 0
        if code >= 0:
            return f"{who} exited with code {code}, {self.where()}"
        hint = "; the system may have run out of memory" if code == -signal.SIGKILL else ""
        return f"{who} was killed by {signal.Signals(-code).name}, {self.where()}{hint}"

    def aftermath(self) -> str:
        """The loss that other workers cannot make good, in words."""
        if self.heartbeat.doing != Doing.EVALUATION:
            return ""
        return ", and its samples are missing from the metrics of this evaluation"

    def where(self) -> str:
        """Its last activity, and its device."""
        return f"{self.heartbeat.where}, on {self.place}" if self.place else self.heartbeat.where


def _sentinel(process: BaseProcess) -> int:
    """A descriptor that is readable when the process ends.

    ``process.sentinel`` is a pipe, which the process' children (data loaders) keep open.
    """
    try:
        return os.pidfd_open(process.pid or 0)
    except (AttributeError, OSError):  # not Linux, an old one, or ended already
        return process.sentinel
