"""How far the update under way has come, for workers on a device: told while it still runs.

An update steps the masters from the buffer's beginning to its end. A worker that waits for its
release can copy what has been stepped to its device meanwhile, instead of all at once afterwards.
One aligned word in shared memory says it: the number of the update and a count of elements, stored
and read at once, so that neither is ever taken with another update's other.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

_SHIFT = 40  # bits of the count: a tebi of elements
_NUMBERS = 2**22  # of updates, after which they begin anew
_WORD, _WATCHED = 0, 1
N_WORDS = 2


class Stepped(NamedTuple):
    """Of update ``number``, the first ``elements`` of the float32 masters are stepped."""

    number: int
    elements: int


class UpdateProgress:
    """Written by the server, read by workers.

    Args:
        words: (N_WORDS,) int64 in shared memory, zero at the beginning.
    """

    def __init__(self, words: memoryview) -> None:
        self._words = words

    @property
    def watched(self) -> bool:
        """Whether any worker reads it; otherwise nothing needs to be written."""
        return bool(self._words[_WATCHED])

    def watch(self) -> None:
        """A worker reads it from now on."""
        self._words[_WATCHED] = 1

    def begin(self) -> None:
        """The next update begins; nothing of it is stepped."""
        number = (self.read().number + 1) % _NUMBERS
        self._words[_WORD] = number << _SHIFT

    def reach(self, elements: int) -> None:
        """So many elements from the beginning are stepped."""
        self._words[_WORD] = self.read().number << _SHIFT | elements

    def read(self) -> Stepped:
        """What was written last."""
        word = self._words[_WORD]
        return Stepped(word >> _SHIFT, word & (1 << _SHIFT) - 1)


class ChunkProgress:
    """Chunks end in any order; told is up to where all have ended.

    Args:
        progress: to be told, of an update that begins now.
        stops: where each chunk ends, in elements, ascending.
    """

    def __init__(self, progress: UpdateProgress, stops: Sequence[int]) -> None:
        self._progress, self._stops = progress, stops
        self._ended = bytearray(len(stops))
        self._next = 0  # the first chunk that has not ended
        self._lock = threading.Lock()
        progress.begin()

    def ended(self, chunk: int) -> None:
        """By number; called once for each, by any thread."""
        with self._lock:
            self._ended[chunk] = 1
            before = self._next
            while self._next < len(self._stops) and self._ended[self._next]:
                self._next += 1
            if self._next > before:
                self._progress.reach(self._stops[self._next - 1])
