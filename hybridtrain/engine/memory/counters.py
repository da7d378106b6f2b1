"""Counters in shared memory: steps on the masters, and the progress of the current update.

An update steps the masters from the buffer's beginning to its end. A worker on a GPU that waits for
its release copies the stepped part meanwhile, instead of everything afterwards. One aligned word
holds the number of the update and the count of stepped elements, so that both are read and written
together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

_SHIFT = 40  # bits of the count: 2**40 elements
_NUMBERS = 2**22  # numbers of updates, then from 0 again
_WORD, _WATCHED = 0, 1
N_WORDS = 2


class UpdateReached(NamedTuple):
    """Update ``number`` has stepped the first ``elements`` of the float32 masters."""

    number: int
    elements: int


class UpdateProgress:
    """Written by the server, read by workers.

    Args:
        words: (N_WORDS,) int64 in shared memory, zero at first.
    """

    def __init__(self, words: memoryview) -> None:
        self._words = words
        self._listeners: list[Callable[[int], object]] = []

    @property
    def watched(self) -> bool:
        """Whether a worker reads the progress, or the server listens; else none is written."""
        return bool(self._words[_WATCHED] or self._listeners)

    def listen(self, listener: Callable[[int], object]) -> None:
        """By the server: call this with the elements that are stepped, from 0; in any thread."""
        self._listeners.append(listener)

    def watch(self) -> None:
        """By a worker: request the progress."""
        self._words[_WATCHED] = 1

    def begin(self) -> None:
        """Begin the next update."""
        self.undone()
        self._tell(0)

    def undone(self) -> None:
        """The current update was undone: workers forget what they have copied of it."""
        number = (self.read().number + 1) % _NUMBERS
        self._words[_WORD] = number << _SHIFT

    def reach(self, elements: int) -> None:
        """The first ``elements`` are stepped."""
        self._words[_WORD] = self.read().number << _SHIFT | elements
        self._tell(elements)

    def _tell(self, elements: int) -> None:
        for listener in self._listeners:
            listener(elements)

    def read(self) -> UpdateReached:
        """The last progress written."""
        word = self._words[_WORD]
        return UpdateReached(word >> _SHIFT, word & (1 << _SHIFT) - 1)


class ChunkProgress:
    """Begins an update whose chunks end in any order; writes the end of the finished prefix.

    Args:
        progress: where it is written.
        stops: the end of each chunk, in elements, ascending.
    """

    def __init__(self, progress: UpdateProgress, stops: Sequence[int]) -> None:
        self._progress, self._stops = progress, stops
        self._ended = bytearray(len(stops))
        self._next = 0  # the first unfinished chunk
        self._lock = threading.Lock()
        progress.begin()

    def ended(self, chunk: int) -> None:
        """Chunk number ``chunk`` is stepped; called once for each, by any thread."""
        with self._lock:
            self._ended[chunk] = 1
            before = self._next
            while self._next < len(self._stops) and self._ended[self._next]:
                self._next += 1
            if self._next > before:
                self._progress.reach(self._stops[self._next - 1])


class MadeSteps:
    """Counts the steps on the masters, including those that workers make without the server.

    Each worker has a cache line, and the server one for its own steps. A worker's line holds its
    number of steps, then its number of finished mini-batches twice, for even and for odd step
    counts: writing the step count commits both, also if the worker dies.

    Args:
        words: (:meth:`n_words`,) int64 in shared memory, zero at first.
        n_workers: W.
    """

    _LINE = 8  # words

    def __init__(self, words: memoryview, n_workers: int) -> None:
        self._words, self._servers = words, self._LINE * n_workers
        self._told = [0] * n_workers  # steps of each worker that the server knows of
        self.ahead = 0  # steps that it did not know of at the last ``look``

    @classmethod
    def n_words(cls, n_workers: int) -> int:
        """How many words there must be."""
        return cls._LINE * (n_workers + 1)

    @property
    def total(self) -> int:
        """The steps of all workers and the server."""
        return sum(self._words[:: self._LINE])

    def begin(self, version: int) -> None:
        """By the server, before training: ``version`` steps have been made."""
        self._words[self._servers] += version - self.total

    def count(self, by: Sequence[int] = ()) -> None:
        """By the server: count its own step, or the reported steps of the workers ``by``."""
        for worker in by:
            self._told[worker] += 1
        self._words[self._servers] += not by

    @property
    def told(self) -> int:
        """For the server: steps that it has made or received a report of."""
        return self._words[self._servers] + sum(self._told)

    def untold(self, worker: int) -> int:
        """For the server: the worker's steps without a report so far."""
        return self._words[self._LINE * worker] - self._told[worker]

    def look(self) -> int:
        """By the server: all workers' steps without a report now."""
        self.ahead = sum(map(self.untold, range(len(self._told))))
        return self.ahead

    def make(self, worker: int, covered: int) -> None:
        """By a worker: count a step; ``covered`` mini-batches are finished with all its steps."""
        made = self._words[self._LINE * worker] + 1
        self._words[self._LINE * worker + 1 + made % 2] = covered
        self._words[self._LINE * worker] = made

    def cover(self, worker: int, covered: int) -> None:
        """Set the worker's number of finished mini-batches; by itself, or once it is gone."""
        self._words[self._place_of_covered(worker)] = covered

    def covered(self, worker: int) -> int:
        """The worker's number of finished mini-batches."""
        return self._words[self._place_of_covered(worker)]

    def _place_of_covered(self, worker: int) -> int:
        return self._LINE * worker + 1 + self._words[self._LINE * worker] % 2
