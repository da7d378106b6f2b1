"""The mean of sparse gradients, as the rows that anybody has touched.

Nothing is as large as the table: the workers' rows are laid one behind the other, and only where a
row occurs more than once something is added, in the order of the workers (which torch's
``coalesce`` does not keep), so that the bits are those of the dense sum.

Legend: n rows, of shape (...); W workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hybridtrain.memory import Rows


@dataclass(frozen=True, slots=True)
class Touched:
    """A sparse gradient: ``values`` (n, ...) of the rows ``rows`` (n,), each of which occurs once;
    in ascending order, unless they come from several workers who have none in common."""

    rows: Rows
    values: torch.Tensor


class Merger:
    """Merges the sparse gradients of one parameter, in memory that is kept."""

    def __init__(self) -> None:
        self._parts: torch.Tensor | None = None
        self._sums: torch.Tensor | None = None

    def merge(self, parts: Sequence[Touched], shares: Sequence[float]) -> Touched:
        """Σ share · gradient. A lone full share is returned as it is, not as a copy.

        Args:
            parts: each with its rows in ascending order.
        """
        if len(parts) == 1 and shares[0] == 1.0:
            return parts[0]
        rows = np.concatenate([part.rows for part in parts])
        self._parts = room(self._parts, len(rows), parts[0].values)
        end = 0
        for part, share in zip(parts, shares, strict=True):
            start, end = end, end + len(part.rows)
            torch.mul(part.values, share, out=self._parts[start:end])
        return self._joined(rows, self._parts[:end])

    def _joined(self, rows: Rows, values: torch.Tensor) -> Touched:
        """Add up what belongs to one row."""
        order = np.argsort(rows, kind="stable")  # linear: a few ascending stretches are merged
        ascending = rows[order]
        first = np.ones(len(rows), dtype=bool)
        np.not_equal(ascending[1:], ascending[:-1], out=first[1:])
        if first.all():
            return Touched(rows, values)
        firsts = torch.from_numpy(order[first])
        self._sums = room(self._sums, len(firsts), values)
        sums = torch.index_select(values, 0, firsts, out=self._sums[: len(firsts)])
        place = np.cumsum(first) - 1
        again = ~first
        sums.index_add_(
            0,
            torch.from_numpy(place[again]),
            values.index_select(0, torch.from_numpy(order[again])),
        )
        return Touched(ascending[first], sums)


def room(memory: torch.Tensor | None, n: int, like: torch.Tensor) -> torch.Tensor:
    """The memory, or a larger one, for n rows like these: (n or more, ...)."""
    if memory is not None and len(memory) >= n and memory.dtype == like.dtype:
        return memory
    return torch.empty((n + n // 2, *like.shape[1:]), dtype=like.dtype)
