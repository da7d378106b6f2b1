"""Training in virtual time: one process computes the gradients of all workers.

Legend: P elements of one dtype's buffer, W workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from hybridtrain.engine.exchanges import Await, Exchange, Leaving, LocalExchange
from hybridtrain.engine.exchanges.compression import Compressor
from hybridtrain.engine.memory import Store
from hybridtrain.engine.memory.layout import as_parameter
from hybridtrain.engine.protocol.messages import (
    Clip,
    DrawnBatch,
    ExchangePush,
    GradientPush,
    Push,
    Row,
)
from hybridtrain.engine.updates import Optimizers, build_update
from hybridtrain.engine.updates.groups import Groups
from hybridtrain.engine.updates.named import NamedUpdate, update_of
from hybridtrain.engine.updates.per_tensor import clip_gradients
from hybridtrain.engine.updates.thread_pool import Pool
from hybridtrain.engine.worker.local_steps import LocalSteps

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class Task(Protocol):
    """Parameters, and gradients at any point."""

    def parameters(self) -> list[torch.Tensor]:
        """The initial values."""

    def gradient(
        self, worker: int, values: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor | None]:
        """Gradients of the worker's mini-batch at these parameters; ``None``: there is none."""


class Timetable(NamedTuple):
    """The mini-batches of an epoch: ``length`` positions; ``sizes``: batch size of each worker."""

    length: int
    sizes: tuple[int, ...]
    drop_last: bool = False


class Scheduled(Protocol):
    """Schedules of learning rates; as it is, there are none."""

    def updated(self, version: int) -> Groups | None:
        """Hyper-parameters that a schedule changes after so many updates."""
        return None

    def epoch_ended(self) -> Groups | None:
        """Hyper-parameters that a schedule changes at the end of an epoch."""
        return None

    def groups(self) -> Groups:
        """All hyper-parameters as they are now."""
        return ()

    def own_schedules(self) -> Scheduled:
        """The same for a worker that counts its own steps in place of updates."""
        return self


class Lessons(Scheduled, Protocol):
    """Epochs of mini-batches."""

    timetable: Timetable

    def study(self, worker: int, epoch: int, positions: Sequence[int]) -> float:
        """Set the worker's next mini-batch, by positions in the epoch; returns its weight."""


@runtime_checkable
class TrainingTask(Task, Lessons, Protocol):
    """A task with data, in epochs of mini-batches."""

    clip: Clip | None  # of the merged gradient
    loss: float  # of the last gradient


class Untrained(Lessons):
    """Epochs of ``length`` samples, of which only the number counts."""

    def __init__(self, length: int, batch_size: int, n_workers: int) -> None:
        self.timetable = Timetable(length, (batch_size,) * n_workers)

    def study(self, worker: int, epoch: int, positions: Sequence[int]) -> float:
        return float(len(positions))


class SimulatedWorker:
    """A worker with its own parameters and optimizer, as an exchange sees it.

    Args:
        worker: its number.
        workers: number of workers.
        masters: the worker's copy, in the order of the task.
        make_optimizer: makes the user's optimizer.
        exchange: copied for this worker.
        fresh: the masters do not move while a worker computes.
    """

    def __init__(
        self,
        worker: int,
        workers: int,
        masters: Sequence[torch.Tensor],
        make_optimizer: MakeOptimizer,
        exchange: LocalExchange,
        fresh: bool,
    ) -> None:
        self._all = [as_parameter(master.clone()) for master in masters]
        self.values = [parameter.data for parameter in self._all]  # in the order of the task
        self.optimizer = make_optimizer(self._all)
        number_of = {id(parameter): number for number, parameter in enumerate(self._all)}
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.numbers = tuple([number_of[id(parameter)] for parameter in trained])
        self._masters = masters
        self.steps = LocalSteps(
            self.optimizer, self.numbers, self, exchange, fresh, worker, workers
        )
        self.covers: tuple[DrawnBatch, ...] = ()  # not handed over yet
        self.fetches = True  # with the last push

    def parameters(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        return [self.values[number] for number in numbers]

    def masters(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        return [self._masters[number] for number in numbers]

    def moved(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        return [self._masters[number] - self.values[number] for number in numbers]

    def begin(self) -> None:
        """Begin with the masters as they were read last."""
        torch._foreach_copy_(self.parameters(self.numbers), self.masters(self.numbers))

    def advance(
        self,
        gradients: Sequence[torch.Tensor | None],
        samples: float,
        clip: Clip | None,
        loss: float | None = None,
    ) -> Leaving:
        """One step with these gradients, in the order of the slots, clipped."""
        for parameter, gradient in zip(self._all, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        with torch.no_grad():
            clip_gradients([p.grad for p in self._all if p.grad is not None], clip)
        return self.steps.advance(samples, loss)

    def take(self) -> Leaving:
        """The worker has been released; perhaps it pushes again."""
        return self.steps.take() if self.fetches else None


class SimulatedReplicas:
    """All workers' gradients and copies of the parameters.

    Args:
        task: computes gradients.
        make_optimizer: makes the user's optimizer for the task's parameters.
        store: masters and W rows.
        exchange: the workers' exchange.
        update: the masters' optimizer; by default the exchange's.
        fresh: the masters do not move while a worker computes.
    """

    def __init__(
        self,
        task: Task,
        make_optimizer: MakeOptimizer,
        store: Store,
        exchange: Exchange,
        update: NamedUpdate | None = None,
        fresh: bool = True,
    ) -> None:
        self.task, self._store, self._slots = task, store, store.layout.slots
        for slot, value in zip(self._slots, task.parameters(), strict=True):
            store.master(slot).copy_(value)
        masters = [as_parameter(store.master(slot)) for slot in self._slots]
        self._users, self._update = make_optimizer(masters), update_of(exchange, update)
        optimizer, pool = self._update.over(self._users), Pool(1)
        number_of = {id(master): number for number, master in enumerate(masters)}
        numbers = [number_of[id(p)] for group in optimizer.param_groups for p in group["params"]]
        made = build_update(optimizer, numbers, store, pool, self._update.merge)
        self.optimizers = Optimizers([made], store, pool)
        workers = range(store.n_workers)
        for worker in workers:
            store.refresh(worker)
        rows, buffers = range(len(store.gradients)), store.buffers
        self._rows = [[store.gradient(row, slot) for slot in self._slots] for row in rows]
        self._copies = [  # by worker and buffer
            [[store.parameter(w, slot, buffer) for slot in self._slots] for buffer in buffers]
            for w in workers
        ]
        self._make_optimizer, self._fresh = make_optimizer, fresh
        self._workers: list[SimulatedWorker] = []
        self._compressors: list[Compressor] = []
        exchange.worker_steps(self)

    # ---- ways to step, from which the exchange chooses ------------------------------------------

    def hand_over_gradients(self, codec: Any) -> None:
        """Each worker's gradients are encoded, if there is a codec."""
        self._compressors = [Compressor(codec) for _ in self._copies if codec is not None]

    def write_to_masters(self, private_state: bool) -> None:
        """Nothing: here each gradient is an update of its own."""

    def step_own_parameters(self, exchange: LocalExchange) -> None:
        """Each worker has parameters of its own."""
        self._make = partial(self._worker, exchange)
        self._workers = [self._make(worker) for worker in range(len(self._copies))]

    def _worker(self, exchange: LocalExchange, worker: int) -> SimulatedWorker:
        masters, make = self._copies[worker][0], self._make_optimizer
        return SimulatedWorker(worker, len(self._copies), masters, make, exchange, self._fresh)

    @property
    def train_alone(self) -> bool:
        """Whether workers step their own parameters."""
        return bool(self._workers)

    @property
    def varies(self) -> bool:
        """Whether pushes differ in bytes."""
        return bool(self._workers or self._compressors)

    @property
    def loss(self) -> float | None:
        """The loss of the last mini-batch, if the task knows it."""
        return self.task.loss if isinstance(self.task, TrainingTask) else None

    def bytes_of(self, push: Push) -> int:
        """Size of a push."""
        if push.row.encoded is not None or push.weight <= 0:
            return push.row.encoded or 0
        trained = self._workers[0].numbers if self._workers else range(len(self._slots))
        slots = [self._slots[number] for number in trained if number not in push.row.absent]
        return sum(slot.numel * slot.dtype.itemsize for slot in slots)

    def compute(self, worker: int, push: Push) -> Push | Await | None:
        """Compute the worker's gradient; returns its push, if it makes one."""
        if self._workers:
            own = self._workers[worker]
            own.covers += push.covers
            gradients = self.task.gradient(worker, own.values)
            clip = self.task.clip if isinstance(self.task, TrainingTask) else None
            return self._offered(worker, own, own.advance(gradients, push.weight, clip, self.loss))
        turns = self._store.turns
        read = self._copies[worker][0 if turns is None else turns.read]
        gradients = self.task.gradient(worker, read)
        push = self._into_row(push, worker, range(len(self._slots)), gradients)
        if isinstance(self.task, TrainingTask):
            assert isinstance(push, GradientPush), "the row holds a gradient"
            return replace(push, loss=self.task.loss, clip=self.task.clip)
        return push

    def flush(self, worker: int) -> Push | Await | None:
        """The worker's last push before a meeting, if any."""
        if not self._workers:
            return None
        own = self._workers[worker]
        return self._offered(worker, own, own.steps.flush(ends=True))

    def lose(self, worker: int) -> None:
        """The worker has died: reset it."""
        if self._workers:
            self._workers[worker] = self._make(worker)
        if self._compressors:
            self._compressors[worker].load_state({})

    def join(self, worker: int) -> None:
        """The worker begins with the current masters."""
        if self._workers:
            self._store.refresh(worker)
            self._workers[worker].begin()

    def take(self, worker: int) -> Push | Await | None:
        """The server has released the worker; returns its next push, if it follows at once."""
        if not self._workers:
            return None
        own = self._workers[worker]
        return self._offered(worker, own, own.take())

    def tell(self, groups: Groups, worker: int | None = None) -> Groups | None:
        """Set hyper-parameters of one worker or all; returns the changes for the server."""
        for own in self._workers if worker is None else self._workers[worker : worker + 1]:
            for group, changed in zip(own.optimizer.param_groups, groups, strict=True):
                group.update(changed)
        return self._update.told(self._users, groups)

    def _offered(self, worker: int, own: SimulatedWorker, offer: Leaving) -> Push | Await | None:
        if offer is None or isinstance(offer, Await):
            own.fetches = True
            return offer
        own.fetches = offer.fetch
        covers: tuple[DrawnBatch, ...] = ()
        if not offer.only_fetches:
            covers, own.covers = own.covers, ()
        made = ExchangePush(
            0,
            offer.weight,
            samples=offer.samples,
            covers=covers,
            loss=self.loss if offer.loss is None else offer.loss,
            fetch=offer.fetch,
            later=offer.later,
        )
        return self._into_row(made, worker, own.numbers, offer.values, offer.encoded)

    def _into_row(
        self,
        push: Push,
        worker: int,
        numbers: Sequence[int],
        values: Sequence[torch.Tensor | None],
        encoded: torch.Tensor | None = None,
    ) -> Push:
        """Write to the worker's row, encoded if there is a codec; returns the push of it."""
        if self._compressors:
            there = {n: v for n, v in zip(numbers, values, strict=True) if v is not None}
            encoded = self._compressors[worker].encode(there)
        if encoded is not None:
            place = self._store.row_of(worker)
            self._store.front(place)[: len(encoded)].copy_(encoded)
            return replace(push, row=Row(_absent(numbers, values), encoded=len(encoded)))
        rows = self._rows[self._store.row_of(worker)]
        for number, value in zip(numbers, values, strict=True):
            row = rows[number]
            row.zero_() if value is None else row.copy_(value)
        return replace(push, row=Row(_absent(numbers, values)))

    def masters(self) -> list[torch.Tensor]:
        """Copies of the master parameters."""
        return [self._store.master(slot).clone() for slot in self._slots]


def _absent(numbers: Sequence[int], values: Sequence[torch.Tensor | None]) -> tuple[int, ...]:
    return tuple(n for n, value in zip(numbers, values, strict=True) if value is None)
