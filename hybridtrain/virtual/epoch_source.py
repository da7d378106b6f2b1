"""The mini-batches of virtual workers, from fixed shares or the server's queue.

In lock-step every worker has a fixed share of each global mini-batch; else it draws from the
server's queue. At the end of an epoch all workers meet, as for a validation, and begin the next one
with the newest parameters. Drawing takes no time: real workers prefetch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hybridtrain.engine.exchanges import Exchange, check_visits
from hybridtrain.engine.memory import Layout, Store
from hybridtrain.engine.protocol.events import Received
from hybridtrain.engine.protocol.messages import (
    Changes,
    Draw,
    DrawnBatch,
    GradientPush,
    LoaderPass,
    Push,
    Ticket,
    Visits,
)
from hybridtrain.engine.protocol.spans import positions, shares_of
from hybridtrain.engine.server.server import ParameterServer
from hybridtrain.engine.server.shared_parameters import turning_of
from hybridtrain.engine.updates.groups import Groups, Members, merged
from hybridtrain.engine.updates.named import NamedUpdate
from hybridtrain.engine.updates.optimizer_set import Optimizers, Stepped
from hybridtrain.virtual.training_task import (
    Lessons,
    MakeOptimizer,
    SimulatedReplicas,
    Task,
    TrainingTask,
)


class IdleOptimizers(Optimizers):
    """One optimizer without parameters, which applies every push at no cost."""

    under_way = None

    def objection(self, worker: int, push: Push) -> str | None:
        return None

    def members(self, worker: int, push: Push) -> Members:
        return ()

    def apply_changes(self, worker: int, number: int, changes: Changes) -> None:
        """Ignore changes of hyper-parameters."""

    def hold(self, worker: int, push: Push) -> bool:
        return push.weight > 0

    def step(self, pushes: Mapping[int, Push], *_: Any, **__: Any) -> Stepped:
        return Stepped(tuple([worker for worker, push in pushes.items() if push.weight > 0]))


def register_workers(
    server: ParameterServer,
    task: Task | None,
    optimizer: MakeOptimizer | None,
    n_workers: int,
    exchange: Exchange,
    update: NamedUpdate | None = None,
    visits: Visits | None = None,
    untrained: Lessons | None = None,
) -> tuple[SimulatedReplicas | None, EpochSource | None]:
    """Give the server the task's parameters; returns its replicas and its data, if there is one.

    Without a task, the data are those ``untrained``, if any.

    Raises:
        UserError: if workers cannot draw from shards of the data.
    """
    if task is None or optimizer is None:
        server.adopt(None, IdleOptimizers())
        return None, None if untrained is None else EpochSource(untrained, server)
    wants = server.requirements
    layout = Layout.of((str(number), value) for number, value in enumerate(task.parameters()))
    turning = turning_of(wants)  # else each worker has a copy of its own, whatever the policy
    store = Store(layout, n_workers, turning is None, holding=wants.holds, turning=turning)
    replicas = SimulatedReplicas(task, optimizer, store, exchange, update, wants.whole_rounds)
    server.adopt(store, replicas.optimizers)
    if not isinstance(task, TrainingTask):
        return replicas, None
    return replicas, EpochSource(task, server, replicas, visits)


class EpochSource:
    """Deals the mini-batches of a task's epochs.

    Args:
        task: has the data and the schedules.
        server: has the queue of mini-batches, where shares are not fixed.
        replicas: receive new hyper-parameters, if there are any.
        visits: workers draw from shards of the data.

    Raises:
        UserError: if ``visits`` is given, and workers have fixed shares.
    """

    def __init__(
        self,
        task: Lessons,
        server: ParameterServer,
        replicas: SimulatedReplicas | None = None,
        visits: Visits | None = None,
    ) -> None:
        self._task, self._server, self._replicas = task, server, replicas
        self._shares = server.requirements.data == "shares"
        self._visits = visits
        if visits is not None:
            check_visits(server.requirements)
        self._turns = server.requirements.takes_turns
        table = task.timetable
        self._present = {*range(len(table.sizes))}
        self._deals_anew = True
        self._whole, self._places = 0, dict[int, list[int]]()
        self._epoch = 0
        self._asks = self._requests()
        self._step = [0] * len(table.sizes)  # of each worker, in the epoch
        self._ended: set[int] = set()  # workers without mini-batches left in the epoch
        own = server.requirements.schedules_own_steps
        self._own = [task.own_schedules() for _ in table.sizes] if own else []
        self._own_steps = [0] * len(self._own)
        self._changed: list[Groups | None] = [None] * len(table.sizes)  # for the next push
        self._version = 0

    # ---- mini-batches ---------------------------------------------------------------------------

    def next(self, worker: int) -> Push | None:
        """The push after the worker's next mini-batch; ``None``: the epoch has no more."""
        if worker in self._ended:
            return None
        return self._share(worker) if self._shares else self._draw(worker)

    def _share(self, worker: int) -> Push | None:
        """The worker's share of the next global mini-batch, if not empty."""
        table = self._task.timetable
        if self._deals_anew and not any(self._step):
            self._whole, self._places = self._dealt()
            self._deals_anew = False
        whole = self._whole
        begin = self._step[worker] * whole
        if begin >= (table.length // whole * whole if table.drop_last else table.length):
            return None
        self._step[worker] += 1
        places = self._places.get(worker, ())  # none of a worker that joins within the epoch
        own = [begin + p for p in places if begin + p < table.length]
        return self._study(worker, own) if own else None

    def _dealt(self) -> tuple[int, dict[int, list[int]]]:
        """The size of a global mini-batch of the workers that are there, and their places in it."""
        there, sizes = sorted(self._present), self._task.timetable.sizes
        own = tuple(sizes[worker] for worker in there)
        return sum(own), dict(zip(there, shares_of(own), strict=True))

    def _draw(self, worker: int) -> Push | None:
        ask = self._asks[self._step[worker] > 0]
        ((_, ticket),) = self._server.on(Received(worker, ask))
        assert isinstance(ticket, Ticket), ticket
        self._step[worker] += 1
        own = list(positions(ticket.spans))
        if len(own) < ask.sizes[worker]:
            self._ended.add(worker)  # as loaders do
        return self._study(worker, own, (DrawnBatch(ask.lap, ticket.spans),)) if own else None

    def _requests(self) -> tuple[Draw, Draw]:
        """For a worker's first mini-batch of the epoch, and for the next ones."""
        table = self._task.timetable
        first = Draw(
            LoaderPass(0, self._epoch), ((0, table.length),), table.length, table.sizes,
            table.drop_last, begins=True, batches_per_turn=int(self._turns), visits=self._visits,
        )  # fmt: skip
        return first, replace(first, begins=False)

    def _study(self, worker: int, own: Sequence[int], covers: tuple[DrawnBatch, ...] = ()) -> Push:
        return GradientPush(0, self._task.study(worker, self._epoch, own), covers=covers)

    # ---- epochs ---------------------------------------------------------------------------------

    @property
    def tag(self) -> str:
        """The name of the meeting at the end of this epoch."""
        return f"the end of epoch {self._epoch}"

    def meet(self) -> None:
        """All workers have ended the epoch."""
        self._epoch += 1
        self._asks = self._requests()
        self._step = [0] * len(self._step)
        self._ended.clear()
        for worker, own in enumerate(self._own):
            self._hear(own.epoch_ended(), worker)
        if not self._own:
            self._hear(self._task.epoch_ended())

    def leave(self, worker: int) -> None:
        """The worker has died: from the next epoch on the others have its share."""
        self._present.discard(worker)
        self._deals_anew = True

    def admit(self, worker: int) -> None:
        """The worker joins at the others' step, and goes on with the schedules of one of them."""
        for other in sorted(self._present)[:1] if self._own else ():
            self._own[worker] = self._own[other].own_schedules()
            self._own_steps[worker] = self._own_steps[other]
            self._hear(self._own[worker].groups(), worker)
        self._present.add(worker)
        self._deals_anew = True
        self._ended.discard(worker)
        self._step[worker] = max(self._step) if self._shares else 0

    # ---- schedules ------------------------------------------------------------------------------

    def _hear(self, changed: Groups | None, worker: int | None = None) -> None:
        """Hyper-parameters of one worker or all have changed."""
        told = changed and self._replicas and self._replicas.tell(changed, worker)
        if told:
            for each in range(len(self._changed)) if worker is None else (worker,):
                self._changed[each] = merged(self._changed[each], told)

    def told(self, worker: int, push: Push) -> Push:
        """The worker's push, with changed hyper-parameters for the server."""
        groups, self._changed[worker] = self._changed[worker], None
        return push if groups is None else replace(push, changes=Changes(groups))

    def stepped(self, worker: int) -> None:
        """The worker has processed a mini-batch."""
        if self._own:
            self._own_steps[worker] += 1
            self._hear(self._own[worker].updated(self._own_steps[worker]), worker)

    def updated(self, version: int) -> None:
        """Advance the schedules to ``version`` updates."""
        if version > self._version:
            self._version = version
            changed = self._task.updated(version)
            self._hear(None if self._own else changed)
