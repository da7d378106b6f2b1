"""A meeting of one host's workers in shared memory: the last to arrive computes for all.

Each has written what it brings to its row before it comes. The last one computes the mean of the
rows under a lock, whose release lets the others read it; no message is sent. Nobody writes to its
row, or comes again, before the mean is there, and the next mean needs all workers once more, so one
place for it is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from hybridtrain.engine.protocol.kernel_lock import KernelLock

_MADE, _TOTAL = range(2)  # the newest round whose mean is there, and its weight
_ROUND, _WEIGHT = range(2)  # of each worker
_LINE = 16  # words, two cache lines: the first line is common, then one per worker


class HostRound:
    """One per host.

    Args:
        words: (:meth:`n_words`,) int64 in shared memory, zero at first.
        n_workers: of this host.
        n_slots: parameters, each of which a worker may have nothing for.
        fd: the file that holds the words; its first byte is locked.
    """

    def __init__(self, words: memoryview, n_workers: int, n_slots: int, fd: int) -> None:
        self._words, self._figures = words, words.cast("B").cast("d")
        self._lines = [_LINE * (1 + worker) for worker in range(n_workers)]
        behind = np.frombuffer(words, dtype=np.int64)[-2 * n_slots :]
        self._brought, self._found = behind[:n_slots], behind[n_slots:]  # (n_slots,) each
        self._lock = KernelLock(fd)

    @classmethod
    def n_words(cls, n_workers: int, n_slots: int) -> int:
        """How many words there must be."""
        return _LINE * (n_workers + 1) + 2 * n_slots

    def come(
        self,
        worker: int,
        weight: float,
        brings: Collection[int],
        make: Callable[[Sequence[float]], object],
    ) -> int:
        """Arrive; the last worker calls ``make`` with all weights. Returns the round's number.

        Args:
            worker: its place among those of this host.
            brings: slot numbers; of a worker without weight they do not count.
        """
        words, figures, line = self._words, self._figures, self._lines[worker]
        with self._lock.held():
            number = words[line + _ROUND] + 1
            figures[line + _WEIGHT] = weight
            words[line + _ROUND] = number
            if weight > 0:
                self._brought[list(brings)] = number
            if all(words[each + _ROUND] == number for each in self._lines):
                weights = [figures[each + _WEIGHT] for each in self._lines]
                make(weights)
                self._found[:] = self._brought == number
                figures[_TOTAL] = sum(weights)
                words[_MADE] = number
        return number

    def is_made(self, number: int) -> bool:
        """Whether all have come to this round, and the mean is there."""
        return self._words[_MADE] >= number

    @property
    def total(self) -> float:
        """The weight of all workers in the newest round."""
        return self._figures[_TOTAL]

    @property
    def absent(self) -> tuple[int, ...]:
        """The slot numbers for which no worker has brought anything to the newest round."""
        return tuple(np.flatnonzero(self._found == 0).tolist())
