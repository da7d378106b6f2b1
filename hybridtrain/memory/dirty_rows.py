"""Which rows of the masters have moved since each worker's own copy was brought up to date.

Where workers run freely each computes with a copy of its own, which has to be renewed after every
update. Of a parameter that an update moves row by row (an embedding) only those rows are copied
again; what lags far behind, or was moved in another way, is copied as a whole.

Legend: R rows, n of them, W workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from hybridtrain.memory.layout import Layout, Slot
from hybridtrain.memory.table import Rows, Table

Buffers = Mapping[torch.dtype, torch.Tensor]  # dtype -> (P,)

_MOST = 8  # a list of more than one in so many rows is not worth keeping


class DirtyRows:
    """What each worker lacks.

    Args:
        layout: where parameters lie.
        masters: what moves.
        copies: of each worker, W of them.
    """

    def __init__(
        self, layout: Layout, masters: Buffers, copies: list[dict[torch.dtype, torch.Tensor]]
    ):
        self._layout, self._masters, self._copies = layout, masters, copies
        self._lacks: dict[int, list[list[Rows] | None]] = {}  # slot -> worker; None: all of it
        self._tables: dict[int, list[Table]] = {}  # slot -> of the master and of each copy
        self._rest: list[tuple[torch.dtype, slice]] | None = None  # what is not copied by rows

    def note(self, numbers: Iterable[int], moved: Mapping[int, Rows]) -> None:
        """An update has stepped these parameters; of some it has ``moved`` only those rows."""
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
        """These were moved in another way."""
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
        """Let the worker's copy be what the masters are."""
        if not self._lacks:
            for dtype, masters in self._masters.items():
                self._copies[worker][dtype].copy_(masters)
            return
        if self._rest is None:
            self._rest = list(self._stretches())
        for dtype, part in self._rest:
            self._copies[worker][dtype][part].copy_(self._masters[dtype][part])
        for number, workers in self._lacks.items():
            master, own = self._tables[number][0], self._tables[number][1 + worker]
            lacks, workers[worker] = workers[worker], []
            if lacks is None:
                own.whole.copy_(master.whole)
            elif lacks:
                own.copy_rows(np.concatenate(lacks), master)

    def _stretches(self) -> Iterable[tuple[torch.dtype, slice]]:
        """The buffers without the parameters that are copied by rows."""
        for dtype, size in self._layout.sizes.items():
            start = 0
            for number, slot in enumerate(self._layout.slots):
                if number in self._lacks and slot.dtype == dtype:
                    if slot.offset > start:
                        yield dtype, slice(start, slot.offset)
                    start = slot.offset + slot.numel
            if size > start:
                yield dtype, slice(start, size)

    def _table(self, buffers: Buffers, number: int) -> Table:
        slot: Slot = self._layout.slots[number]
        return Table(slot.view(buffers[slot.dtype][slot.offset :][: slot.numel]))
