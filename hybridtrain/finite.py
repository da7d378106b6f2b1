"""Are the gradients that a worker is about to hand over numbers?

One pass over the worker's row: a sum is finite only if all its terms are, so most rows are cleared
by a single reduction. Where the sum is not finite, each parameter is looked at on its own.

Legend: P elements of one dtype's buffer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

import torch

from hybridtrain.memory import Store


class FiniteCheck:
    """Looks at one worker's row.

    Args:
        store: the shared rows.
        worker: whose.
    """

    def __init__(self, store: Store, worker: int) -> None:
        self._store, self._worker = store, worker

    def offender(self, numbers: tuple[int, ...], absent: Collection[int]) -> int | None:
        """The first of these parameters with a gradient that is not finite.

        Places of ``absent`` parameters hold something old and do not count.
        """
        if all(map(_has_finite_sum, self._stretches(numbers))):
            return None
        gone = set(absent)
        return next((n for n in numbers if n not in gone and not self._is_finite(n)), None)

    def count(self, number: int) -> tuple[int, int]:
        """How many elements of a parameter's gradient are not finite, and of how many."""
        row = self._row(number)
        return int((~torch.isfinite(row)).sum()), row.numel()

    def forget(self) -> None:
        """Leave nothing behind that would be seen again where a later gradient is absent."""
        for row in self._store.gradients[self._worker].values():
            row.zero_()

    def _row(self, number: int) -> torch.Tensor:
        return self._store.gradient(self._worker, self._store.layout.slots[number])

    def _is_finite(self, number: int) -> bool:
        return bool(torch.isfinite(self._row(number)).all())

    def _stretches(self, numbers: tuple[int, ...]) -> Iterator[torch.Tensor]:
        """The part of the row that these parameters lie in, dtype by dtype."""
        slots = [self._store.layout.slots[n] for n in numbers]
        for dtype, row in self._store.gradients[self._worker].items():  # (P,)
            own = [slot for slot in slots if slot.dtype == dtype]
            if own:
                start = min(slot.offset for slot in own)
                yield row[start : max(slot.offset + slot.numel for slot in own)]


def _has_finite_sum(flat: torch.Tensor) -> bool:
    real = torch.view_as_real(flat) if flat.is_complex() else flat
    wide = torch.float32 if real.itemsize < 4 else real.dtype
    return math.isfinite(float(real.sum(dtype=wide)))
