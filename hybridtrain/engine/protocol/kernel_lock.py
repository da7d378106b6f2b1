"""A lock between processes that the kernel releases when its holder dies.

A POSIX record lock on the first byte of a file. It does not exclude threads of one process.
"""

from __future__ import annotations

import fcntl
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Frees = Callable[[int, float], object]  # gets the holder's pid and the seconds it has held the lock

_PAUSE_S = 5e-5  # between two tries
_LOOK_S = 0.05  # between two looks at the holder
_FLOCK = "hhqqi4x"  # Linux's struct flock: type, whence, start, length, process


class KernelLock:
    """On the file behind ``fd``; no descriptor of it may be closed while the lock is held."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @contextmanager
    def held(self, waits: bool = True) -> Iterator[None]:
        """Hold it.

        Raises:
            BlockingIOError: if another process holds it and ``waits`` is false.
        """
        fcntl.lockf(self._fd, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1)

    @contextmanager
    def within(self, for_s: float) -> Iterator[bool]:
        """Hold it, or give up after ``for_s`` seconds; yields whether it is held."""
        taken = self._take(for_s)
        try:
            yield taken
        finally:
            if taken:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1)

    @contextmanager
    def seized(self, frees: Frees) -> Iterator[None]:
        """Hold it at any price: ``frees`` is called with the holder, and may kill it.

        The kernel releases a dead process's lock once none of its threads can write. Seconds are
        counted in looks, so that a pause of this process counts as one look.
        """
        holder, for_s = 0, 0.0
        while not self._take(_LOOK_S):
            before, holder = holder, self._holder()
            for_s = _LOOK_S + (for_s if holder == before else 0.0)
            frees(holder, for_s)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1)

    def _holder(self) -> int:
        """The pid of the holder; 0: none, or unknown."""
        if sys.platform != "linux":
            return 0
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, 0, 0, 1, 0)
        kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(self._fd, fcntl.F_GETLK, asked))
        return 0 if kind == fcntl.F_UNLCK else int(pid)

    def _take(self, for_s: float) -> bool:
        until_s = 0.0
        while True:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
                return True
            except BlockingIOError:
                now_s = time.monotonic()
                until_s = until_s or now_s + for_s
                if now_s >= until_s:
                    return False
                time.sleep(_PAUSE_S)
