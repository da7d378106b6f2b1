"""Rows of the masters that have changed since each worker's copy was last updated.

Each free-running worker computes with a copy of the masters, which is updated after every update.
If an update changes a parameter row by row (an embedding), only those rows are copied; a parameter
with many outdated rows, or changed in another way, is copied as a whole.

Legend: R rows, n of them, W workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from hybridtrain.memory.layout import Layout, Slot
from hybridtrain.memory.table import Rows, Table

Buffers = Mapping[torch.dtype, torch.Tensor]  # dtype -> (P,)

_MOST = 8  # with more than one outdated row in so many, the parameter is copied as a whole


class DirtyRows:
    """The outdated rows of each worker's copy.

    Args:
        layout: the places of the parameters.
        masters: the master buffers.
        copies: each worker's buffers, W of them.
    """

    def __init__(
        self, layout: Layout, masters: Buffers, copies: list[dict[torch.dtype, torch.Tensor]]
    ):
        self._layout, self._masters, self._copies = layout, masters, copies
        self._lacks: dict[int, list[list[Rows] | None]] = {}  # slot -> worker; None: all rows
        self._tables: dict[int, list[Table]] = {}  # slot -> the master's, then each copy's
        self._rest: list[tuple[torch.dtype, slice]] | None = None  # parts not copied by rows

    def note(self, numbers: Iterable[int], moved: Mapping[int, Rows]) -> None:
        """Record an update of these parameters; of some it has ``moved`` only these rows."""
        if not moved and not self._lacks:
            return
        for number in moved.keys() - self._lacks.keys():
            self._lacks[number] = [None for _ in self._copies]
            self._tables[number] = [
                self._table(each, number) for each in (self._masters, *self._copies)
            ]
            self._rest = None
        for number in self._lacks.keys() & set(numbers):
            self._add(number, moved.get(number))

    def all_of(self, numbers: Iterable[int]) -> None:
        """Record that these parameters have changed as a whole."""
        for number in self._lacks.keys() & set(numbers):
            self._add(number, None)

    def _add(self, number: int, rows: Rows | None) -> None:
        workers = self._lacks[number]
        for worker, lacks in enumerate(workers):
            if rows is None or lacks is None:
                workers[worker] = None
                continue
            lacks.append(rows)
            if sum(map(len, lacks)) * _MOST > self._tables[number][0].n_rows:
                workers[worker] = None

    def bring(self, worker: int) -> None:
        """Update the worker's copy from the masters."""
        if not self._lacks:
            for dtype, masters in self._masters.items():
                self._copies[worker][dtype].copy_(masters)
            return
        if self._rest is None:
            others = set(range(len(self._layout.slots))) - self._lacks.keys()
            self._rest = list(self._layout.stretches(others))
        for dtype, part in self._rest:
            self._copies[worker][dtype][part].copy_(self._masters[dtype][part])
        for number, workers in self._lacks.items():
            master, own = self._tables[number][0], self._tables[number][1 + worker]
            lacks, workers[worker] = workers[worker], []
            if lacks is None:
                own.whole.copy_(master.whole)
            elif lacks:
                own.copy_rows(np.concatenate(lacks), master)

    def _table(self, buffers: Buffers, number: int) -> Table:
        slot: Slot = self._layout.slots[number]
        return Table(slot.view(buffers[slot.dtype][slot.offset :][: slot.numel]))
