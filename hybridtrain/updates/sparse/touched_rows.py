"""The mean of the workers' sparse gradients, over the union of their rows.

The whole mean is only needed for clipping and momentum. Otherwise it is only planned which workers
have a gradient of a row, and a thread computes the mean of a portion, in cache, when it steps that
portion. Rows are added in the order of the workers (unlike in torch's ``coalesce``), so that the
bits are those of the dense sum.

Legend: n rows, of shape (...); k of them with gradients of several workers; W workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hybridtrain.memory import Rows
from hybridtrain.memory.sparse_rows import ascending, same_as_before


@dataclass(frozen=True, slots=True)
class Touched:
    """A sparse gradient: ``values`` (n, ...) of distinct ``rows`` (n,), a worker's ascending."""

    rows: Rows
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class More:
    """Another worker's addends: its values ``at`` (k,), for the places ``to`` (k,), ascending."""

    to: Rows
    at: Rows
    values: torch.Tensor
    share: float


@dataclass(frozen=True, slots=True)
class RowPiece:
    """Rows (n,) for which a worker is the first with a gradient: its values ``at`` (n,), or all."""

    rows: Rows
    at: Rows | None
    values: torch.Tensor
    share: float
    more: tuple[More, ...] = ()

    def mean(self, part: slice, out: torch.Tensor) -> torch.Tensor:
        """The mean of a part of the rows, at the beginning of ``out``, (n or more, ...)."""
        n = len(self.rows[part])
        if self.at is None:
            mean = torch.mul(self.values[part], self.share, out=out[:n])
        else:
            chosen = torch.from_numpy(self.at[part])
            mean = torch.index_select(self.values, 0, chosen, out=out[:n]).mul_(self.share)
        for more in self.more:
            first, last = np.searchsorted(more.to, (part.start, part.start + n))
            if last > first:
                to = torch.from_numpy(more.to[first:last] - part.start)
                added = more.values.index_select(0, torch.from_numpy(more.at[first:last]))
                mean.index_add_(0, to, added.mul_(more.share))
        return mean


def pieces_of(parts: Sequence[Touched], shares: Sequence[float]) -> list[RowPiece]:
    """Plan Σ share · gradient.

    Args:
        parts: each worker's gradient, with ascending rows.
    """
    if len(parts) == 1:
        return [RowPiece(parts[0].rows, None, parts[0].values, shares[0])]
    rows, order = ascending(np.concatenate([part.rows for part in parts]))
    again = np.flatnonzero(same_as_before(rows))
    if not len(again):
        return [
            RowPiece(part.rows, None, part.values, share)
            for part, share in zip(parts, shares, strict=True)
        ]
    first = np.searchsorted(rows, rows[again])  # the leftmost of equal ones
    return _divided(parts, shares, order[first], order[again])


def _divided(
    parts: Sequence[Touched],
    shares: Sequence[float],
    to: Rows,  # (k,) places in the workers' concatenated rows
    at: Rows,  # (k,) places of the addends; both ascend with the row numbers
) -> list[RowPiece]:
    """Split the plan by workers."""
    ends = np.cumsum([len(part.rows) for part in parts])
    owner, adder = np.searchsorted(ends, to, "right"), np.searchsorted(ends, at, "right")
    starts = [0, *ends.tolist()]
    pieces = []
    for w, (part, share) in enumerate(zip(parts, shares, strict=True)):
        own = _without(len(part.rows), at[adder == w] - starts[w])
        more = []
        for other in range(w + 1, len(parts)):
            chosen = np.flatnonzero((owner == w) & (adder == other))
            if len(chosen):
                places, theirs = to[chosen] - starts[w], at[chosen] - starts[other]
                places = places if own is None else np.searchsorted(own, places)
                more.append(More(places, theirs, parts[other].values, shares[other]))
        rows = part.rows if own is None else part.rows[own]
        pieces.append(RowPiece(rows, own, part.values, share, tuple(more)))
    return pieces


def _without(n: int, gone: Rows) -> Rows | None:
    """The places of n rows without ``gone``; ``None``: all."""
    if not len(gone):
        return None
    kept = np.ones(n, dtype=bool)
    kept[gone] = False
    return np.flatnonzero(kept)


class Merger:
    """Merges the sparse gradients of one parameter, in reused memory."""

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None

    def merge(self, parts: Sequence[Touched], shares: Sequence[float]) -> Touched:
        """Σ share · gradient; a lone gradient with share 1 is returned itself.

        Args:
            parts: each with ascending rows.
        """
        if len(parts) == 1 and shares[0] == 1.0:
            return parts[0]
        pieces = pieces_of(parts, shares)
        rows = np.concatenate([piece.rows for piece in pieces])
        self._sums = room(self._sums, len(rows), parts[0].values)
        end = 0
        for piece in pieces:
            start, end = end, end + len(piece.rows)
            piece.mean(slice(0, len(piece.rows)), self._sums[start:end])
        return Touched(rows, self._sums[:end])


def room(memory: torch.Tensor | None, n: int, like: torch.Tensor) -> torch.Tensor:
    """The memory, or a new one, for n rows of this shape: (n or more, ...)."""
    if memory is not None and len(memory) >= n and memory.dtype == like.dtype:
        return memory
    return torch.empty((n + n // 2, *like.shape[1:]), dtype=like.dtype)
