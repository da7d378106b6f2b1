"""Turns: workers read one of two copies of the masters, and write to one of two rows.

Where an update is made while workers compute (``Needs.delay``), nobody may read what is being
written. The update steps the masters, from the gradients in one row of each worker; meanwhile
workers read one buffer with a copy of the masters, and write the next gradient to their other row.
The update's result then goes to the other buffer, which no worker reads before its next release.

| | buffer that is read | the other one | rows of the update, of the next gradient |
| --- | --- | --- | --- |
| all have been released with update t | t | is written | 0, 1 |
| update t + 1 is made | t | t + 1 | |
| all have been released again | t + 1 | is written | 1, 0 |
"""

from __future__ import annotations


class Turns:
    """The present turn, in shared memory: written by the server, read by all.

    Args:
        words: (N_WORDS,) int64, zero at first.
    """

    N_WORDS = 3
    _READ, _NEWEST, _NEXT_ROW = range(N_WORDS)

    def __init__(self, words: memoryview) -> None:
        self._words = words
        self.row = 0  # of each worker: of the update here, of the next gradient in a worker
        self._changes = -1  # of the masters that the newest buffer has

    @property
    def read(self) -> int:
        """The number of the buffer that workers read."""
        return self._words[self._READ]

    @property
    def newest(self) -> int:
        """The number of the buffer with the newest masters."""
        return self._words[self._NEWEST]

    @property
    def spare(self) -> int:
        """The number of the buffer that no worker reads."""
        return 1 - self.read

    @property
    def behind(self) -> bool:
        """Whether workers read older parameters than the newest."""
        return self.read != self.newest

    def take(self) -> None:
        """By a worker, which is released: the next gradient goes to this row."""
        self.row = self._words[self._NEXT_ROW]

    def needs(self, changes: int) -> bool:
        """Whether the masters have changed so often, but not the buffer; it is up to date now."""
        old, self._changes = self._changes, changes
        return old != changes

    def read_newest(self) -> None:
        """Workers read the newest buffer."""
        self._words[self._READ] = self._words[self._NEWEST]

    def begin(self) -> None:
        """Workers are released; the update that follows reads the rows of ``row``."""
        self.read_newest()
        self._words[self._NEXT_ROW] = 1 - self.row

    def end(self) -> None:
        """The update is made, and lies in the spare buffer; the next one reads the other rows."""
        self._words[self._NEWEST] = self.spare
        self.row = self._words[self._NEXT_ROW]

    def resume(self) -> None:
        """Training goes on with parameters that are one update behind, in the buffer to be read."""
        self._words[self._NEWEST] = self.spare
