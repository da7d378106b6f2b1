"""The elements of a gradient in the flat buffers: stretches, or rows of sparse gradients.

Legend: P elements of one dtype's buffer, n elements of a stretch, r rows, s sparse dimensions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from hybridtrain.memory import Layout, Packed, Slot
from hybridtrain.memory.sparse_rows import indices_of, used

CHUNK = 256 * 1024  # elements that fit the cache

Buffers = Mapping[torch.dtype, torch.Tensor]  # dtype -> (P,)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Elements ``start`` to ``stop`` of a buffer, all of parameter ``number``."""

    number: int
    dtype: torch.dtype
    start: int
    stop: int

    def read(self, buffers: Buffers) -> torch.Tensor:
        """A view of them, (n,)."""
        return buffers[self.dtype][self.start : self.stop]

    def write(self, buffers: Buffers, values: torch.Tensor) -> None:
        """Write the values, unless they are the view that ``read`` has returned."""
        place = self.read(buffers)
        if place.data_ptr() != values.data_ptr():
            place.copy_(values)

    gradient = read  # of a worker's buffers


@dataclass(frozen=True, slots=True)
class RowSet:
    """The rows of parameter ``number`` in a sparse gradient."""

    number: int
    slot: Slot
    packed: Packed

    @property
    def dtype(self) -> torch.dtype:
        """Of the elements."""
        return self.slot.dtype

    def read(self, buffers: Buffers) -> torch.Tensor:
        """A copy of them, (r, ...)."""
        return self._whole(buffers)[self.indices()]

    def write(self, buffers: Buffers, values: torch.Tensor) -> None:
        """Write the values."""
        self._whole(buffers)[self.indices()] = values

    def gradient(self, buffers: Buffers) -> torch.Tensor:
        """A view of the packed values in a worker's buffers, (r, ...)."""
        whole = self._whole(buffers)
        shape = (self.packed.n_rows, *whole.shape[self.packed.sparse_dim :])
        return used(self.packed, whole).view(shape)

    def indices(self) -> tuple[torch.Tensor, ...]:
        """The indices along each sparse dimension, (r,) each."""
        return indices_of(self.packed).unbind(0)

    def _whole(self, buffers: Buffers) -> torch.Tensor:
        flat = buffers[self.slot.dtype][self.slot.offset :][: self.slot.numel]
        return self.slot.view(flat)


Part = Stretch | RowSet


def parts_of(
    layout: Layout, numbers: Iterable[int], absent: Collection[int], packed: Mapping[int, Packed]
) -> list[Part]:
    """The elements of a gradient of these parameters."""
    found: list[Part] = []
    for number in numbers:
        slot = layout.slots[number]
        if number in packed:
            found.append(RowSet(number, slot, packed[number]))
        elif number not in absent:
            stop = slot.offset + slot.numel
            found += [
                Stretch(number, slot.dtype, start, min(start + CHUNK, stop))
                for start in range(slot.offset, stop, CHUNK)
            ]
    return found


def union(lists: Sequence[Sequence[Part]]) -> list[Part]:
    """The union of the lists, each element once."""
    dense = {part: None for parts in lists for part in parts if isinstance(part, Stretch)}
    whole = {part.number for part in dense}
    sparse: dict[int, list[RowSet]] = {}
    for part in (part for parts in lists for part in parts):
        if isinstance(part, RowSet) and part.number not in whole:
            sparse.setdefault(part.number, []).append(part)
    return [*dense, *(_joined(rows) for rows in sparse.values())]


def _joined(parts: Sequence[RowSet]) -> RowSet:
    first = parts[0]
    if len(parts) == 1:
        return first
    indices = torch.cat([indices_of(part.packed) for part in parts], dim=1).unique(dim=1)
    return replace(
        first, packed=replace(first.packed, indices=indices.contiguous().numpy().tobytes())
    )
