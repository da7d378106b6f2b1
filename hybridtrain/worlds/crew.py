"""One worker process, as its parent knows it."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

from hybridtrain.worlds.channel import Channel


@dataclass
class WorkerProcess:
    """A process that does the work of one worker; another may take its place.

    ``number``: of the worker; ``sentinel``: readable once the process has ended; ``ended``: it has
    said how it ended; ``gone``: it has been reaped; ``cause``: why the parent has killed it.
    """

    number: int
    channel: Channel
    process: BaseProcess
    sentinel: int
    result: Any = None
    ended: bool = False
    gone: bool = False
    cause: str = ""

    @classmethod
    def of(cls, number: int, channel: Channel, process: BaseProcess) -> WorkerProcess:
        """The process has just been started."""
        with suppress(OSError):  # it has ended already: the sentinel will tell
            channel.give_bells()
        return cls(number, channel, process, _sentinel(process))

    def kill(self, cause: str = "") -> None:
        """At once, whatever it does; ``cause`` is what the obituary will say."""
        self.cause = self.cause or cause
        if not self.gone:
            self.process.kill()

    def bury(self) -> None:
        """The process has ended."""
        self.process.join()
        self.gone = True

    def close(self) -> None:
        """Give all descriptors back."""
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
            return f"{who} exited with code {code}"
        hint = "; the system may have run out of memory" if code == -signal.SIGKILL else ""
        return f"{who} was killed by {signal.Signals(-code).name}{hint}"


def _sentinel(process: BaseProcess) -> int:
    """A descriptor that says at once when the process ends.

    ``process.sentinel`` is a pipe, which the process' own children (a data loader's) keep open.
    """
    try:
        return os.pidfd_open(process.pid or 0)
    except (AttributeError, OSError):  # not Linux, an old one, or ended already
        return process.sentinel
