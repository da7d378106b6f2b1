"""Are the gradients that a worker is about to hand over numbers?

One pass over the worker's row: a sum is finite only if all its terms are, so most rows are cleared
by a single reduction. Where the sum is not finite, each parameter is looked at on its own.

Legend: P elements of one dtype's buffer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

import torch

from hybridtrain.memory import Packed, Store
from hybridtrain.memory.sparse_rows import used


class FiniteCheck:
    """Looks at one worker's row.

    Args:
        store: the shared rows.
        worker: whose.
    """

    def __init__(self, store: Store, worker: int) -> None:
        self._store, self._worker = store, worker
        self._known: dict[tuple[int, ...], list[torch.Tensor]] = {}
        self._rows: dict[int, torch.Tensor] = {}  # by parameter

    def offender(
        self,
        numbers: tuple[int, ...],
        absent: Collection[int],
        packed: Collection[Packed] = (),
        known: Collection[int] = (),
    ) -> int | None:
        """The first of these parameters with a gradient that is not finite.

        Places of ``absent`` parameters hold something old and do not count, nor what lies behind
        the values of ``packed`` ones. Those that are ``known`` to be finite need no look.
        """
        sparse = {each.number: used(each, self._row(each.number)) for each in packed}
        for number, values in sparse.items():
            if not has_finite_sum(values) and not torch.isfinite(values).all():
                return number
        dense = tuple([n for n in numbers if n not in sparse and n not in known])
        if all(map(has_finite_sum, self._stretches(dense))):
            return None
        gone = set(absent)
        return next((n for n in dense if n not in gone and not self._is_finite(n)), None)

    def count(self, number: int) -> tuple[int, int]:
        """How many elements of a parameter's gradient are not finite, and of how many."""
        row = self._row(number)
        return int((~torch.isfinite(row)).sum()), row.numel()

    def forget(self) -> None:
        """Leave nothing behind that would be seen again where a later gradient is absent."""
        for row in self._store.gradients[self._worker].values():
            row.zero_()

    def _row(self, number: int) -> torch.Tensor:
        if number not in self._rows:
            slot = self._store.layout.slots[number]
            self._rows[number] = self._store.gradient(self._worker, slot)
        return self._rows[number]

    def _is_finite(self, number: int) -> bool:
        return bool(torch.isfinite(self._row(number)).all())

    def _stretches(self, numbers: tuple[int, ...]) -> list[torch.Tensor]:
        """The parts of the row that these parameters lie in, neighbours in one."""
        if numbers not in self._known:
            self._known[numbers] = list(self._find_stretches(set(numbers)))
        return self._known[numbers]

    def _find_stretches(self, numbers: set[int]) -> Iterator[torch.Tensor]:
        for dtype, row in self._store.gradients[self._worker].items():  # (P,)
            start = stop = 0
            for number, slot in enumerate(self._store.layout.slots):
                if slot.dtype != dtype:
                    continue
                if number in numbers:
                    stop = slot.offset + slot.numel
                    continue
                if stop > start:
                    yield row[start:stop]
                start = stop = slot.offset + slot.numel
            if stop > start:
                yield row[start:stop]


def has_finite_sum(flat: torch.Tensor) -> bool:
    """Whether the sum of all is; that of large ones may not be, though they are."""
    real = torch.view_as_real(flat) if flat.is_complex() else flat
    wide = torch.float32 if real.itemsize < 4 else real.dtype
    return math.isfinite(float(real.sum(dtype=wide)))
