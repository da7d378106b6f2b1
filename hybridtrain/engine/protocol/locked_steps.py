"""Updates that workers make one by one, each of its own gradient, without the server.

Theory of operation. Where every gradient is an update of its own (``async``), the worker makes that
update with the server's code, and copies the masters. It holds a lock meanwhile, so updates do not
overlap and its copy is of one version. Shared memory holds the number of updates
(:class:`hybridtrain.engine.memory.counters.MadeSteps`); workers report several to the server
together.

The server handles everything unusual, under the same lock. A worker that dies during an update
leaves the word ``_MAKING`` set, and the server restores the backup made before that update. A
worker that is stopped there is killed by the server, which needs the lock (:class:`KernelLock`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto

from hybridtrain.engine.memory.counters import MadeSteps
from hybridtrain.engine.protocol.kernel_lock import Frees, KernelLock
from hybridtrain.engine.protocol.step_log import StepLog

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
        log: of a recorded run.
    """

    N_WORDS = 8  # a cache line

    def __init__(
        self, words: memoryview, made: MadeSteps, fd: int, log: StepLog | None = None
    ) -> None:
        self._last: int | None = None  # the version after which no update is made
        self._words, self._made, self._lock, self._log = words, made, KernelLock(fd), log

    def end_at(self, last: int | None) -> None:
        """Make no update after this version."""
        self._last = last

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
            over = self._last is not None and self._made.total >= self._last
            full = self._log is not None and not self._log.has_room(self._made.total + 1)
            if not held or self._is_torn or over or full:
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
