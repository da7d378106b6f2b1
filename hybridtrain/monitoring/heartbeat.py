"""A worker's signs of life, for the process that watches it.

Theory of operation. Every worker shares one page of memory with its parent, without a name, and
writes there what it is doing, and how often it has begun to. That takes three stores, so it may be
done at every mini-batch; nobody is woken, and no clock is read. The parent looks now
and then: a worker that neither waits for an answer nor has said or sent anything since, for much
longer than it has ever needed for the same, hangs (:mod:`hybridtrain.monitoring.hang_detector`).

Behind these numbers, in the same file, is room for the worker's stacks, which :mod:`faulthandler`
writes when a signal asks for them. It does so in the signal handler itself, in C, so it does not
matter what the interpreter waits for.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
from enum import IntEnum

from hybridtrain.util.anonymous_files import anonymous_descriptor

_PAGE_BYTES = mmap.PAGESIZE
_ASK: int | None = getattr(signal, "SIGRTMAX", None)  # nobody uses those numbers; not on macOS
STACKS_SIGNAL = None if _ASK is None else int(_ASK) - 3


class Doing(IntEnum):
    """What a worker does. Between two words of its own, that is what it still does."""

    STARTING = 0
    STEP = 1
    BETWEEN = 2
    EVALUATION = 3
    EPOCH = 4
    CHECKPOINT = 5
    ENDING = 6

    def __str__(self) -> str:
        return _IN_WORDS[self]


_IN_WORDS = {
    Doing.STARTING: "starting up",
    Doing.STEP: "in a training step",
    Doing.BETWEEN: "between mini-batches (data, callbacks)",
    Doing.EVALUATION: "in an evaluation step",
    Doing.EPOCH: "at the beginning or end of an epoch or of a validation",
    Doing.CHECKPOINT: "saving a checkpoint",
    Doing.ENDING: "ending",
}


_FIRST = 2  # before: what is done, and the number of beats; from here on: beats by kind
_N_BYTES = 8 * (_FIRST + len(Doing))


class Heartbeat:
    """One page, seen from either side.

    Args:
        fd: of a file made by :func:`heartbeat_file`; this object owns it. ``None``: nobody watches.
    """

    def __init__(self, fd: int | None = None) -> None:
        self._fd = fd
        self._map = None if fd is None else mmap.mmap(fd, _PAGE_BYTES)
        self._numbers = memoryview(self._map or bytearray(_N_BYTES)).cast("q")
        self.failed_in = ""  # in words, what the worker did when its code raised

    # ---- the worker's side ----------------------------------------------------------------------

    def beat(self, doing: Doing) -> None:
        """From now on the worker does this (perhaps again)."""
        numbers = self._numbers
        numbers[0] = doing
        numbers[1] += 1
        numbers[_FIRST + doing] += 1

    def fail(self) -> None:
        """The worker's code has raised; what it does from now on is to end."""
        self.failed_in = self.failed_in or self.where

    def tell_stacks(self) -> None:
        """From now on the parent may ask for this process' stacks."""
        if STACKS_SIGNAL is not None and self._fd is not None:
            faulthandler.register(STACKS_SIGNAL, self._fd, all_threads=True, chain=False)

    def fall_silent(self) -> None:
        """In a process that was forked from the worker: nobody hears it any more."""
        self._numbers = memoryview(bytearray(_N_BYTES)).cast("q")

    # ---- the parent's side ----------------------------------------------------------------------

    @property
    def doing(self) -> Doing:
        """What the worker does."""
        return Doing(self._numbers[0])

    @property
    def beats(self) -> int:
        """How often it has said so."""
        return self._numbers[1]

    def begun(self, doing: Doing) -> int:
        """How often it has begun to do this."""
        return self._numbers[_FIRST + doing]

    @property
    def where(self) -> str:
        """What the worker does, in words."""
        doing = self.doing
        step = f"in its training step {self.begun(doing)}"
        return step if doing == Doing.STEP else str(doing)

    def forget_stacks(self) -> None:
        """What the worker writes from now on is to be read."""
        assert self._fd is not None, "somebody watches"
        os.ftruncate(self._fd, _PAGE_BYTES)
        os.lseek(self._fd, _PAGE_BYTES, os.SEEK_SET)  # the worker's position, too: it is one file

    def stacks(self) -> str:
        """What the worker has written so far."""
        assert self._fd is not None, "somebody watches"
        length = os.fstat(self._fd).st_size - _PAGE_BYTES
        return os.pread(self._fd, max(0, length), _PAGE_BYTES).decode(errors="replace")

    def close(self) -> None:
        """Give everything back."""
        self._numbers.release()
        if self._map is not None:
            self._map.close()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def heartbeat_file() -> int:
    """A file that no path leads to; it is gone when all who have it open are."""
    fd = anonymous_descriptor()
    os.ftruncate(fd, _PAGE_BYTES)
    return fd
