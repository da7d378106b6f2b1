"""Updates that workers make one by one: each of its own gradient, and nobody waits for anybody.

Theory of operation. Where every gradient is an update of its own, as soon as it is there, the
worker that has it makes that update, with the server's own pass over masters and state, and takes a
copy of the masters along. It holds a lock meanwhile, so updates are whole and in order, and what a
worker computes with is always one version. How many there are stands in shared memory
(:class:`hybridtrain.memory.lending.MadeSteps`); the server hears of several together.

Whatever is unusual is the server's, under the same lock. A worker that dies in the middle of an
update leaves ``making`` behind; the server puts back what was kept before that update began. One
that is stopped there is killed by the server, which needs the lock (:class:`KernelLock`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto

from hybridtrain.memory.lending import MadeSteps
from hybridtrain.protocol.kernel_lock import Frees, KernelLock

_MAKING, _GENERATION = range(2)


class Tried(Enum):
    """What came of it that a worker wants to make an update."""

    MADE = auto()
    OUTDATED = auto()  # what is lent is not what it knows
    LEFT = auto()  # to the server


class LockedSteps:
    """Of the workers of one run.

    Args:
        words: (:attr:`N_WORDS`,) int64 in shared memory, zero at the beginning.
        made: the steps of all.
        fd: of the file that the words lie in.
    """

    N_WORDS = 8  # a cache line

    def __init__(self, words: memoryview, made: MadeSteps, fd: int) -> None:
        self.last: int | None = None  # the version behind which no update is made
        self._words, self._made, self._lock = words, made, KernelLock(fd)

    @property
    def generation(self) -> int:
        """Of what is lent."""
        return self._words[_GENERATION]

    @property
    def _is_over(self) -> bool:
        return self.last is not None and self._made.total >= self.last

    @property
    def _is_torn(self) -> bool:
        """Under the lock: whoever has begun an update is gone."""
        return self._words[_MAKING] > self._made.total

    def make(
        self,
        generation: int,
        keep: Callable[[], object],
        step: Callable[[], object],
        for_s: float,
    ) -> Tried:
        """For a worker that has borrowed what is lent as ``generation``.

        ``keep`` copies what ``step`` changes; that also counts the update in ``made``. Another one
        is waited for no longer than ``for_s`` seconds.
        """
        with self._lock.within(for_s) as held:
            if not held or self._is_torn or self._is_over:
                return Tried.LEFT
            if self._words[_GENERATION] != generation:
                return Tried.OUTDATED
            keep()
            self._words[_MAKING] = self._made.total + 1
            step()
        return Tried.MADE

    @contextmanager
    def stopped(self, restore: Callable[[], object], frees: Frees) -> Iterator[None]:
        """For the server: nobody makes an update meanwhile, and each that was begun is whole."""
        with self._lock.seized(frees):
            if self._is_torn:
                restore()
                self._words[_MAKING] = 0
            yield

    def renew(self) -> None:
        """By the server: what is lent is another now."""
        self._words[_GENERATION] += 1
