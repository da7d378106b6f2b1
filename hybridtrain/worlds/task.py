"""Something to train in virtual time: all workers' gradients, computed by one process.

Legend: P elements of one dtype's buffer, W workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from hybridtrain.memory import Layout, Store
from hybridtrain.update import Optimizers, build_update
from hybridtrain.update.pool import Pool

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class Task(Protocol):
    """Something to train: parameters, and gradients at any point."""

    def parameters(self) -> list[torch.Tensor]:
        """The initial values."""
        ...

    def gradient(self, worker: int, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Of the worker's next mini-batch, at these parameters; each in its parameter's shape."""
        ...


class Pupils:
    """The workers' rows: each has a gradient, and parameters as it has read them.

    Args:
        task: what is trained.
        make_optimizer: makes the user's optimizer for the task's parameters.
        store: masters and W rows, of the task's layout.
    """

    def __init__(self, task: Task, make_optimizer: MakeOptimizer, store: Store) -> None:
        self.task, self.store = task, store
        slots = store.layout.slots
        for slot, value in zip(slots, task.parameters(), strict=True):
            store.master(slot).copy_(value)
        masters = [torch.nn.Parameter(store.master(slot)) for slot in slots]
        pool = Pool(1)
        update = build_update(make_optimizer(masters), range(len(masters)), store, pool)
        self.optimizers = Optimizers([update], store, pool)
        for worker in range(store.n_workers):
            store.refresh(worker)

    @torch.no_grad()
    def compute(self, worker: int) -> None:
        """The worker's gradient, at its own parameters, into its row."""
        slots = self.store.layout.slots
        values = [self.store.parameter(worker, slot) for slot in slots]
        for slot, gradient in zip(slots, self.task.gradient(worker, values), strict=True):
            self.store.gradient(worker, slot).copy_(gradient)

    def masters(self) -> list[torch.Tensor]:
        """The master parameters as they are now, copied."""
        return [self.store.master(slot).clone() for slot in self.store.layout.slots]


def layout_of(task: Task) -> Layout:
    """Where the task's parameters lie."""
    return Layout.of((f"{number}", value) for number, value in enumerate(task.parameters()))
