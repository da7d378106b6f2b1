"""The progress of the current update, for workers on a GPU.

An update steps the masters from the buffer's beginning to its end. A worker that waits for its
release copies the stepped part to its GPU meanwhile, instead of everything afterwards. One aligned
word in shared memory holds the number of the update and the count of stepped elements, so that
both are read and written together.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

_SHIFT = 40  # bits of the count: 2**40 elements
_NUMBERS = 2**22  # numbers of updates, then from 0 again
_WORD, _WATCHED = 0, 1
N_WORDS = 2


class Progress(NamedTuple):
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

    @property
    def watched(self) -> bool:
        """Whether a worker reads the progress; otherwise none is written."""
        return bool(self._words[_WATCHED])

    def watch(self) -> None:
        """By a worker: request the progress."""
        self._words[_WATCHED] = 1

    def begin(self) -> None:
        """Begin the next update."""
        number = (self.read().number + 1) % _NUMBERS
        self._words[_WORD] = number << _SHIFT

    def reach(self, elements: int) -> None:
        """The first ``elements`` are stepped."""
        self._words[_WORD] = self.read().number << _SHIFT | elements

    def read(self) -> Progress:
        """The last progress written."""
        word = self._words[_WORD]
        return Progress(word >> _SHIFT, word & (1 << _SHIFT) - 1)


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
