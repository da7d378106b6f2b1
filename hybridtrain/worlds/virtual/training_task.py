"""Something to train in virtual time: all workers' gradients, computed by one process.

Legend: P elements of one dtype's buffer, W workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from hybridtrain.memory import Layout, Store
from hybridtrain.protocol.messages import Clip, Push
from hybridtrain.updates import Optimizers, build_update
from hybridtrain.updates.groups import Groups
from hybridtrain.updates.thread_pool import Pool

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class Task(Protocol):
    """Something to train: parameters, and gradients at any point."""

    def parameters(self) -> list[torch.Tensor]:
        """The initial values."""
        ...

    def gradient(
        self, worker: int, values: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor | None]:
        """Of the worker's mini-batch, at these parameters; each in its parameter's shape.

        ``None``: the parameter has none.
        """
        ...


@dataclass(frozen=True, slots=True)
class Timetable:
    """How an epoch is made into mini-batches: ``length`` positions, ``sizes`` of each worker."""

    length: int
    sizes: tuple[int, ...]
    drop_last: bool = False


@runtime_checkable
class TrainingTask(Task, Protocol):
    """A task with data: workers go through epochs of mini-batches."""

    timetable: Timetable
    clip: Clip | None  # of the merged gradient
    loss: float  # of the last gradient

    def study(self, worker: int, epoch: int, positions: Sequence[int]) -> float:
        """The worker's next mini-batch, by positions in the epoch; its weight in samples."""
        ...

    def updated(self, version: int) -> Groups | None:
        """So many updates have been made: the hyper-parameters, where a schedule changes them."""
        ...

    def epoch_ended(self) -> Groups | None:
        """Everybody has ended an epoch: the hyper-parameters, where a schedule changes them."""
        ...


class SimulatedReplicas:
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
        number_of = {id(master): number for number, master in enumerate(masters)}
        pool, optimizer = Pool(1), make_optimizer(masters)
        numbers = [number_of[id(p)] for group in optimizer.param_groups for p in group["params"]]
        self.optimizers = Optimizers([build_update(optimizer, numbers, store, pool)], store, pool)
        for worker in range(store.n_workers):
            store.refresh(worker)

    def compute(self, worker: int, push: Push) -> Push:
        """The worker's gradient, at its own parameters, into its row; and what it tells of it."""
        slots = self.store.layout.slots
        values = [self.store.parameter(worker, slot) for slot in slots]
        gradients = self.task.gradient(worker, values)
        for slot, gradient in zip(slots, gradients, strict=True):
            row = self.store.gradient(worker, slot)
            row.zero_() if gradient is None else row.copy_(gradient)
        absent = tuple(number for number, gradient in enumerate(gradients) if gradient is None)
        if isinstance(self.task, TrainingTask):
            return replace(push, absent=absent, loss=self.task.loss, clip=self.task.clip)
        return replace(push, absent=absent) if absent else push

    def masters(self) -> list[torch.Tensor]:
        """The master parameters as they are now, copied."""
        return [self.store.master(slot).clone() for slot in self.store.layout.slots]


def layout_of(task: Task) -> Layout:
    """Where the task's parameters lie."""
    return Layout.of((f"{number}", value) for number, value in enumerate(task.parameters()))
