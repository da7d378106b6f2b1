"""A worker's signs of life, in memory shared with the process that watches it.

Theory of operation. Every worker shares one anonymous page of memory with its parent and writes
there what it is doing and how often it has begun to. That takes three stores, no system call and no
clock, so it is cheap enough for every mini-batch. The parent looks about once a second: a worker
hangs if it neither waits for a reply nor has beaten or sent a message for much longer than this
activity has ever taken (:mod:`hybridtrain.monitoring.hang_detector`).

After these numbers the same file holds the worker's stacks, which :mod:`faulthandler` writes on a
signal. Its handler is in C, so it works whatever the interpreter is blocked in.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
from enum import IntEnum

from hybridtrain.util.anonymous_files import anonymous_descriptor

_PAGE_BYTES = mmap.PAGESIZE
_ASK: int | None = getattr(signal, "SIGRTMAX", None)  # real-time signals are unused; not on macOS
STACKS_SIGNAL = None if _ASK is None else int(_ASK) - 3


class Doing(IntEnum):
    """A worker's activity, from one heartbeat to the next."""

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


_FIRST = 2  # 0: the activity, 1: number of beats, from here on: beats per activity
_N_BYTES = 8 * (_FIRST + len(Doing))


class Heartbeat:
    """The shared page; the worker writes it, the parent reads it.

    Args:
        fd: of a file made by :func:`heartbeat_file`; this object owns it. ``None``: not watched.
    """

    def __init__(self, fd: int | None = None) -> None:
        self._fd = fd
        self._map = None if fd is None else mmap.mmap(fd, _PAGE_BYTES)
        self._numbers = memoryview(self._map or bytearray(_N_BYTES)).cast("q")
        self.failed_in = ""  # the activity in which the worker's code raised

    # ---- the worker's side ----------------------------------------------------------------------

    def beat(self, doing: Doing) -> None:
        """The worker begins this activity."""
        numbers = self._numbers
        numbers[0] = doing
        numbers[1] += 1
        numbers[_FIRST + doing] += 1

    def fail(self) -> None:
        """The worker's code has raised; keep the activity in which it did."""
        self.failed_in = self.failed_in or self.where

    def tell_stacks(self) -> None:
        """Let the parent ask for this process' stacks by a signal."""
        if STACKS_SIGNAL is not None and self._fd is not None:
            faulthandler.register(STACKS_SIGNAL, self._fd, all_threads=True, chain=False)

    def fall_silent(self) -> None:
        """In a process forked from the worker: stop writing to the shared page."""
        self._numbers = memoryview(bytearray(_N_BYTES)).cast("q")

    # ---- the parent's side ----------------------------------------------------------------------

    @property
    def doing(self) -> Doing:
        """The current activity."""
        return Doing(self._numbers[0])

    @property
    def beats(self) -> int:
        """Number of beats so far."""
        return self._numbers[1]

    def begun(self, doing: Doing) -> int:
        """How often the worker has begun this activity."""
        return self._numbers[_FIRST + doing]

    @property
    def where(self) -> str:
        """The current activity in words."""
        doing = self.doing
        step = f"in its training step {self.begun(doing)}"
        return step if doing == Doing.STEP else str(doing)

    def forget_stacks(self) -> None:
        """Discard stacks written before."""
        assert self._fd is not None, "it is watched"
        os.ftruncate(self._fd, _PAGE_BYTES)
        os.lseek(self._fd, _PAGE_BYTES, os.SEEK_SET)  # shared with the worker: one file description

    def stacks(self) -> str:
        """The stacks that the worker has written so far."""
        assert self._fd is not None, "it is watched"
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
    """An anonymous file for one worker's page and stacks; returns its descriptor."""
    fd = anonymous_descriptor()
    os.ftruncate(fd, _PAGE_BYTES)
    return fd
