"""Updates that workers make one by one, each of its own gradient, without the server.

Theory of operation. Where every gradient is an update of its own (``async``), the worker makes that
update with the server's code, and copies the masters. It holds a lock meanwhile, so updates do not
overlap and its copy is of one version. Shared memory holds the number of updates
(:class:`hybridtrain.memory.counters.MadeSteps`); workers report several to the server together.

The server handles everything unusual, under the same lock. A worker that dies during an update
leaves the word ``_MAKING`` set, and the server restores the backup made before that update. A
worker that is stopped there is killed by the server, which needs the lock (:class:`KernelLock`).
"""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto

from hybridtrain.memory.counters import MadeSteps

# ---- A lock between processes that the kernel releases when its holder dies ---------------------
# A POSIX record lock on the first byte of a file. It does not exclude threads of one process.

try:
    import fcntl
except ImportError:  # Windows: there is none
    fcntl = None  # type: ignore[assignment]

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


_MAKING, _GENERATION = range(2)


class Tried(Enum):
    """The outcome of a worker's attempt at an update."""

    MADE = auto()
    OUTDATED = auto()  # the server has lent other state since
    LEFT = auto()  # the server must make it


class LockedSteps:
    """One per run, shared by its workers and the server.

    Args:
        words: (:attr:`N_WORDS`,) int64 in shared memory, zero at first.
        made: counts the steps of all.
        fd: the file that holds the words.
    """

    N_WORDS = 8  # a cache line

    def __init__(self, words: memoryview, made: MadeSteps, fd: int) -> None:
        self.last: int | None = None  # the version after which no update is made
        self._words, self._made, self._lock = words, made, KernelLock(fd)

    @property
    def generation(self) -> int:
        """The generation of the lent state."""
        return self._words[_GENERATION]

    @property
    def _is_torn(self) -> bool:
        """Under the lock: a worker has died during an update."""
        return self._words[_MAKING] > self._made.total

    def make(
        self,
        generation: int,
        keep: Callable[[], object],
        step: Callable[[], object],
        for_s: float,
    ) -> Tried:
        """By a worker that has mapped the state of ``generation``.

        ``keep`` backs up what ``step`` changes; ``step`` also counts the update in ``made``. Waits
        at most ``for_s`` seconds for the lock.
        """
        with self._lock.within(for_s) as held:
            over = self.last is not None and self._made.total >= self.last
            if not held or self._is_torn or over:
                return Tried.LEFT
            if self._words[_GENERATION] != generation:
                return Tried.OUTDATED
            keep()
            self._words[_MAKING] = self._made.total + 1
            step()
        return Tried.MADE

    @contextmanager
    def stopped(self, restore: Callable[[], object], frees: Frees) -> Iterator[None]:
        """By the server: hold the lock, and ``restore`` the state if an update was torn."""
        with self._lock.seized(frees):
            if self._is_torn:
                restore()
                self._words[_MAKING] = 0
            yield

    def renew(self) -> None:
        """By the server: the lent state has been replaced."""
        self._words[_GENERATION] += 1
