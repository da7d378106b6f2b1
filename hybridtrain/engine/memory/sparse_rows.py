"""Sparse gradients in a worker's row, which has room for dense ones.

The values of the touched rows lie packed at the beginning of the parameter's place: no index occurs
twice, so they need at most the room of the dense gradient. The message carries the indices.
Rows that were not touched are neither zeroed, nor read, nor written.

Legend: n touched rows, s sparse dimensions.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from hybridtrain.errors import UserError

# ---- read and write single rows of a parameter --------------------------------------------------
# Torch copies rows element by element; numpy copies a row as one item of so many bytes: it writes
# 2,000 rows of 64 numbers in 50 instead of 160 µs.
#
# Viewing a tensor's memory as such items takes six calls, as long as copying 100 rows; a *block*
# keeps both views of its memory.
#
# Legend: R rows, n of them, each of shape (...).

Rows = np.ndarray[tuple[int], np.dtype[np.int64]]  # row numbers, (n,)

_HUGE = 2 * 2**20  # bytes of a large page


class Block:
    """Memory for ``size`` rows of a tensor ``like`` this one, (R, ...)."""

    def __init__(self, size: int, like: torch.Tensor) -> None:
        self.tensor = torch.empty((size, *like.shape[1:]), dtype=like.dtype)
        self.items = _items(self.tensor)


class Table:
    """The rows of a tensor.

    Args:
        whole: (R, ...), contiguous, in host memory.
    """

    def __init__(self, whole: torch.Tensor) -> None:
        self.whole = whole
        self.n_rows = whole.shape[0]
        self._items = _items(whole)

    def take(self, rows: Rows, out: Block) -> torch.Tensor:
        """Copy these rows to the beginning of ``out``; returns that part, (n, ...)."""
        n = len(rows)
        if n:
            self._items.take(rows, out=out.items[:n], mode="clip")
        return out.tensor[:n]

    def put(self, rows: Rows, values: Block) -> None:
        """Write these distinct rows from the beginning of ``values``."""
        self._items[rows] = values.items[: len(rows)]

    def copy_rows(self, rows: Rows, source: Table) -> None:
        """Copy these rows from a table of the same shape."""
        self._items[rows] = source._items[rows]


def _items(rows: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    """The rows as numpy items of one row each, (n,)."""
    item = np.dtype((np.void, rows[:1].numel() * rows.element_size()))
    raw = rows.detach().view(len(rows), -1).view(torch.uint8).numpy()
    return raw.view(item)[:, 0]


def is_table(tensor: torch.Tensor) -> bool:
    """Whether its rows are contiguous."""
    return tensor.ndim > 0 and tensor.numel() > 0 and tensor.is_contiguous()


def zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros like a contiguous tensor; the kernel allocates pages on the first write.

    In huge pages where available: rows scattered over a table would cost a page fault each.
    """
    n_bytes = tensor.numel() * tensor.element_size()
    if n_bytes < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros_like(tensor)
    memory = mmap.mmap(-1, n_bytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    flat = torch.frombuffer(
        memory, dtype=tensor.dtype, count=tensor.numel(), offset=-address % _HUGE
    )
    return flat.view(tensor.shape)


Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]

_INDEX = torch.int64
_KEY_BITS = 63  # of an integer that holds a row and a place


@dataclass(frozen=True, slots=True)
class Packed:
    """Parameter ``number`` has a sparse gradient: ``indices`` is (s, n) int64."""

    number: int
    sparse_dim: int
    indices: bytes

    @property
    def n_rows(self) -> int:
        """Touched rows, n."""
        return len(self.indices) // (_INDEX.itemsize * max(self.sparse_dim, 1))

    def shape_in(self, whole: Sequence[int]) -> tuple[int, ...]:
        """The shape of the values, (n, ...), for a parameter of the shape ``whole``."""
        return (self.n_rows, *whole[self.sparse_dim :])


def pack(
    number: int,
    gradient: torch.Tensor,  # sparse
    place: torch.Tensor,  # host, shared, in the parameter's shape
) -> Packed:
    """Copy the values to the place; the caller waits for the copy if it is from a GPU.

    Values of equal indices are added as by ``coalesce``.

    Raises:
        UserError: if the place is of another dtype than the gradient.
    """
    if place.dtype != gradient.dtype:
        raise UserError(
            f"transport_dtype={str(place.dtype).removeprefix('torch.')} was given, but a parameter "
            f"of shape {tuple(place.shape)} has a sparse gradient, which travels as it is; leave "
            "transport_dtype out, or use sparse=False"
        )
    if (rows := _gather(gradient, place)) is not None:
        return Packed(number, 1, rows.tobytes())
    gradient = gradient.coalesce()
    values, indices = gradient.values(), gradient.indices().cpu()
    flat_view(place)[: values.numel()].copy_(values.reshape(-1), non_blocking=True)
    return Packed(number, gradient.sparse_dim(), indices.contiguous().numpy().tobytes())


def _gather(gradient: torch.Tensor, place: torch.Tensor) -> Rows | None:
    """Copy whole rows to the place in ascending order, directly from autograd's gradient.

    Returns ``None`` where ``coalesce`` must do it: its sort has another order, which changes the
    bits of a sum of more than two values.
    """
    values, n = gradient._values(), gradient._nnz()
    if gradient.is_coalesced() or gradient.sparse_dim() != 1 or values.device.type != "cpu":
        return None
    if not values.numel() or len(place).bit_length() + n.bit_length() > _KEY_BITS:
        return None
    rows, order = ascending(gradient._indices()[0].numpy())
    again = same_as_before(rows)
    n_rows = n - int(np.count_nonzero(again))
    if n_rows < n and np.logical_and(again[1:], again[:-1]).any():
        return None
    values = values.reshape(n, -1)
    out = flat_view(place)[: n_rows * values.shape[1]].view(n_rows, -1)
    if n_rows == n:
        torch.index_select(values, 0, torch.from_numpy(order), out=out)
        return rows
    firsts = torch.from_numpy(order[~again])
    torch.index_select(values, 0, firsts, out=out)
    seconds = values.index_select(0, torch.from_numpy(order[again]))
    out.index_add_(0, torch.from_numpy(places_of_firsts(again)), seconds)
    return rows[~again]


def ascending(rows: Rows) -> tuple[Rows, Rows]:
    """A stable sort: rows in ascending order, and the position of each before.

    Sorting integers of row and position together takes a tenth of an indirect stable sort.
    """
    bits = len(rows).bit_length()
    keys = rows << bits
    keys |= np.arange(len(rows))
    keys.sort()
    return keys >> bits, keys & ((1 << bits) - 1)


def same_as_before(rows: Rows) -> Flags:
    """Which of these ascending rows equal their predecessor."""
    same = np.zeros(len(rows), dtype=bool)
    np.equal(rows[1:], rows[:-1], out=same[1:])
    return same


def places_of_firsts(again: Flags) -> Rows:
    """For each repeated row, the position of its first occurrence among all distinct rows."""
    at = np.flatnonzero(again)
    return at - np.arange(1, len(at) + 1)


def unpack(packed: Packed, place: torch.Tensor) -> torch.Tensor:
    """The coalesced sparse gradient; its values are a view of ``place``."""
    values = used(packed, place)
    return torch.sparse_coo_tensor(
        indices_of(packed), values, place.shape, is_coalesced=True, check_invariants=False
    )


def used(packed: Packed, place: torch.Tensor) -> torch.Tensor:
    """The part of the place that holds the values, (n, ...)."""
    shape = packed.shape_in(place.shape)
    return flat_view(place)[: prod(shape)].view(shape)


def indices_of(packed: Packed) -> torch.Tensor:
    """The indices, (s, n) int64."""
    if not packed.indices:
        return torch.empty(packed.sparse_dim, 0, dtype=_INDEX)
    return torch.frombuffer(bytearray(packed.indices), dtype=_INDEX).view(packed.sparse_dim, -1)


def rows_of(packed: Packed) -> Rows:
    """The touched rows, (n,), ascending; for one sparse dimension."""
    return np.frombuffer(packed.indices, dtype=np.int64)


def flat_view(dense: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor without gaps, 1-D."""
    return dense.as_strided((dense.numel(),), (1,))
