"""Contributions to updates that workers make without the server, for the record of the run.

Theory of operation. A ring in shared memory has a place for each contribution to the last updates.
A worker writes there before the update counts. Before the server handles an event, it reads the
contributions of all updates made since. So the order in the record is that of the updates, and a
contribution whose update was not made is never read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

MADE, TOLD = "Made", "Told"  # in records: a push that is part of such an update, a report of them
_UPDATES = 128  # in the ring
_ON, _READ, _CELLS = range(3)
_CELL = struct.Struct("<HxxIffd")
_WORDS = _CELL.size // 8


class LoggedContribution(NamedTuple):
    """One worker's gradient: its checksum, computing time and samples, and when it was there."""

    worker: int
    print: int
    own_s: float
    samples: float
    at_s: float


class StepLog:
    """One per run, shared by its workers and the server.

    Args:
        words: (:meth:`n_words`,) int64 in shared memory, zero at first.
        each: contributions to an update: 1, or W.
    """

    def __init__(self, words: memoryview, each: int) -> None:
        self._words, self._each = words, each
        self._cells = words[_CELLS:].cast("B")

    @classmethod
    def n_words(cls, each: int) -> int:
        """How many words there must be."""
        return _CELLS + _WORDS * _UPDATES * each

    @property
    def is_on(self) -> bool:
        """Whether the run is recorded."""
        return bool(self._words[_ON])

    def switch_on(self) -> None:
        """By the server: the run is recorded."""
        self._words[_ON] = 1

    def has_room(self, version: int) -> bool:
        """Whether the update that makes this version has a place; always, if none is recorded."""
        return version - self._words[_READ] <= _UPDATES or not self.is_on

    def write(self, version: int, place: int, contribution: LoggedContribution) -> None:
        """By a worker: its contribution to the update that makes this version."""
        _CELL.pack_into(self._cells, self._start(version, place), *contribution)

    def _start(self, version: int, place: int) -> int:
        return _CELL.size * (version % _UPDATES * self._each + place)

    def read(self, version: int) -> Iterator[list[LoggedContribution]]:
        """By the server: the contributions to each update since ``skip``, up to this version."""
        for number in range(self._words[_READ] + 1, version + 1):
            starts = (self._start(number, place) for place in range(self._each))
            yield [LoggedContribution(*_CELL.unpack_from(self._cells, start)) for start in starts]

    def skip(self, version: int) -> None:
        """By the server: the updates up to this version have been read, or are its own."""
        self._words[_READ] = version
