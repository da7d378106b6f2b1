"""The shared state of a run: master parameters and one row per worker, as flat tensors.

Legend: P elements of one dtype's buffer (padding included), W workers.
"""

from __future__ import annotations

import torch

from hybridtrain.memory.arena import Arena, align
from hybridtrain.memory.layout import Layout, Slot


class Store:
    """Flat views of one arena.

    Args:
        layout: where parameters lie.
        n_workers: W.
        private_parameters: give each worker a row of parameters of its own, for policies under
            which the masters move while workers compute.
        arena: one made by another process's ``Store`` of the same shape; else a new one.
        averaging: have one more row, for the mean of the gradients.
    """

    def __init__(
        self,
        layout: Layout,
        n_workers: int,
        private_parameters: bool,
        arena: Arena | None = None,
        averaging: bool = False,
    ) -> None:
        self.layout = layout
        self.n_workers = n_workers
        self.private_parameters = private_parameters
        self.averaging = averaging
        self._starts: dict[tuple[str, torch.dtype, int], int] = {}
        n_bytes = self._place_buffers()
        self.arena = arena or Arena.create(n_bytes)
        self.masters = self._flat("masters", 0)  # dtype -> (P,) host, shared
        self.gradients = [self._flat("gradients", w) for w in range(n_workers)]  # W × dtype -> (P,)
        self.copies = (
            [self._flat("copies", w) for w in range(n_workers)] if private_parameters else []
        )  # W × dtype -> (P,), or nothing
        self.means = self._flat("means", 0) if averaging else {}  # dtype -> (P,), or nothing

    def _place_buffers(self) -> int:
        end = 0
        rows = {"masters": 1, "gradients": self.n_workers}
        rows["copies"] = self.n_workers if self.private_parameters else 0
        rows["means"] = int(self.averaging)
        for kind, count in rows.items():
            for row in range(count):
                for dtype, size in self.layout.sizes.items():
                    self._starts[kind, dtype, row] = end
                    end = align(end + size * dtype.itemsize)
        return end

    def _flat(self, kind: str, row: int) -> dict[torch.dtype, torch.Tensor]:
        return {
            dtype: self.arena.tensor(self._starts[kind, dtype, row], size, dtype)
            for dtype, size in self.layout.sizes.items()
        }

    def _view(self, kind: str, row: int, slot: Slot) -> torch.Tensor:
        start = self._starts[kind, slot.dtype, row] + slot.offset * slot.dtype.itemsize
        return slot.view(self.arena.tensor(start, slot.numel, slot.dtype))

    def master(self, slot: Slot) -> torch.Tensor:
        """The master parameter, in its own shape."""
        return self._view("masters", 0, slot)

    def gradient(self, worker: int, slot: Slot) -> torch.Tensor:
        """The place of the worker's gradient of this parameter, in the parameter's shape."""
        return self._view("gradients", worker, slot)

    def mean(self, slot: Slot) -> torch.Tensor:
        """The place of the mean gradient of this parameter, in the parameter's shape."""
        return self._view("means", 0, slot)

    def parameter(self, worker: int, slot: Slot) -> torch.Tensor:
        """What the worker computes with: its own copy, or the master itself in lock-step."""
        if self.private_parameters:
            return self._view("copies", worker, slot)
        return self.master(slot)

    def refresh(self, worker: int) -> None:
        """Copy the masters to the worker's own parameters; nothing to do when it reads in place."""
        if self.private_parameters:
            for dtype, masters in self.masters.items():
                self.copies[worker][dtype].copy_(masters)
