"""Check that the gradients in a worker's row are finite.

A finite sum has finite terms, so one reduction over the row suffices mostly. If the sum is not
finite, each parameter is checked.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch

from hybridtrain.engine.memory import Packed, Store
from hybridtrain.engine.memory.sparse_rows import used


class FiniteCheck:
    """Checks one worker's row.

    Args:
        store: the shared rows.
        worker: the number of the worker.
    """

    def __init__(self, store: Store, worker: int) -> None:
        self._store, self._worker = store, worker
        self._known: dict[tuple[int, tuple[int, ...]], list[torch.Tensor]] = {}
        self._rows: dict[tuple[int, int], torch.Tensor] = {}  # by row and parameter

    def offender(
        self,
        numbers: tuple[int, ...],
        absent: Collection[int],
        packed: Collection[Packed] = (),
        known: Collection[int] = (),
    ) -> int | None:
        """The first of these parameters with a gradient that is not finite.

        Skips the places of ``absent`` parameters, the rest of a ``packed`` parameter's place, which
        hold old values, and parameters ``known`` to be finite.
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
        """The number of non-finite elements of a parameter's gradient, and of all."""
        row = self._row(number)
        return int((~torch.isfinite(row)).sum()), row.numel()

    def forget(self) -> None:
        """Zero the row: its values would be read again where a later gradient is absent."""
        for row in self._store.rows_of(self._worker):
            for flat in self._store.gradients[row].values():
                flat.zero_()

    def _row(self, number: int) -> torch.Tensor:
        row = self._store.row_of(self._worker)
        if (row, number) not in self._rows:
            slot = self._store.layout.slots[number]
            self._rows[row, number] = self._store.gradient(row, slot)
        return self._rows[row, number]

    def _is_finite(self, number: int) -> bool:
        return bool(torch.isfinite(self._row(number)).all())

    def _stretches(self, numbers: tuple[int, ...]) -> list[torch.Tensor]:
        """The parts of the row that hold these parameters, adjacent ones joined."""
        row = self._store.row_of(self._worker)
        if (row, numbers) not in self._known:
            flats, stretches = self._store.gradients[row], self._store.layout.stretches
            parts = [flats[dtype][part] for dtype, part in stretches(set(numbers))]
            self._known[row, numbers] = parts
        return self._known[row, numbers]


def has_finite_sum(flat: torch.Tensor) -> bool:
    """Whether the sum is finite; the sum of large finite values may not be."""
    real = torch.view_as_real(flat) if flat.is_complex() else flat
    wide = torch.float32 if real.itemsize < 4 else real.dtype
    return math.isfinite(float(real.sum(dtype=wide)))
