"""The mini-batches of virtual workers, from fixed shares or the server's queue.

In lock-step every worker has a fixed share of each global mini-batch; else it draws from the
server's queue. At the end of an epoch all workers meet, as for a validation, and begin the next one
with the newest parameters. Drawing takes no time: real workers prefetch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hybridtrain.exchanges import Exchange, check_visits
from hybridtrain.memory import Layout, Store
from hybridtrain.protocol.events import Arrivals, Received
from hybridtrain.protocol.messages import (
    Changes,
    Draw,
    DrawnBatch,
    GradientPush,
    LoaderPass,
    Push,
    Ticket,
    Visits,
)
from hybridtrain.protocol.spans import positions, shares_of, total
from hybridtrain.server.server import Server
from hybridtrain.updates.groups import Groups, Members, merged
from hybridtrain.updates.named import NamedUpdate
from hybridtrain.updates.optimizer_set import Optimizers, Stepped
from hybridtrain.worlds.virtual.training_task import (
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

    def step(
        self,
        pushes: Mapping[int, Push],
        number: int | None = None,
        arrivals: Arrivals | None = None,
        lead: int | None = None,
    ) -> Stepped:
        return Stepped(tuple([worker for worker, push in pushes.items() if push.weight > 0]))


def register_workers(
    server: Server,
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
    store = Store(layout, n_workers, True, holding=wants.holds)
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
        server: Server,
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
        self._places = shares_of(table.sizes)
        self._epoch = 0
        self._step = [0] * len(table.sizes)  # of each worker, in the epoch
        self._ended: set[int] = set()  # workers without mini-batches left in the epoch
        self._groups: Groups | None = None  # hyper-parameters that have changed
        self._untold: set[int] = set()  # workers whose next push is to have them
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
        whole = sum(table.sizes)
        begin = self._step[worker] * whole
        if begin >= (table.length // whole * whole if table.drop_last else table.length):
            return None
        self._step[worker] += 1
        own = [begin + p for p in self._places[worker] if begin + p < table.length]
        return self._study(worker, own) if own else None

    def _draw(self, worker: int) -> Push | None:
        table, lap = self._task.timetable, LoaderPass(0, self._epoch)
        ask = Draw(
            lap, ((0, table.length),), table.length, table.sizes, table.drop_last,
            begins=self._step[worker] == 0, batches_per_turn=int(self._turns), visits=self._visits,
        )  # fmt: skip
        ((_, ticket),) = self._server.on(Received(worker, ask))
        assert isinstance(ticket, Ticket), ticket
        self._step[worker] += 1
        n_drawn = total(ticket.spans)
        if n_drawn < table.sizes[worker]:
            self._ended.add(worker)  # as loaders do
        if not n_drawn:
            return None
        push = self._study(worker, list(positions(ticket.spans)))
        return replace(push, covers=(DrawnBatch(lap, ticket.spans),))

    def _study(self, worker: int, own: Sequence[int]) -> Push:
        return GradientPush(0, self._task.study(worker, self._epoch, own))

    # ---- epochs ---------------------------------------------------------------------------------

    @property
    def tag(self) -> str:
        """The name of the meeting at the end of this epoch."""
        return f"the end of epoch {self._epoch}"

    def meet(self) -> None:
        """All workers have ended the epoch."""
        self._epoch += 1
        self._step = [0] * len(self._step)
        self._ended.clear()
        self._hear(self._task.epoch_ended())

    def admit(self, worker: int) -> None:
        """The worker joins at the others' step."""
        self._ended.discard(worker)
        self._step[worker] = max(self._step) if self._shares else 0

    # ---- schedules ------------------------------------------------------------------------------

    def _hear(self, changed: Groups | None) -> None:
        groups = self._replicas.tell(changed) if changed and self._replicas is not None else None
        if groups is not None:
            self._groups = merged(self._groups, groups)
            self._untold = {*range(len(self._step))}

    def told(self, worker: int, push: Push) -> Push:
        """The worker's push, with changed hyper-parameters for the server."""
        if worker not in self._untold:
            return push
        self._untold.discard(worker)
        return replace(push, changes=Changes(self._groups))

    def updated(self, version: int) -> None:
        """Advance the schedules to ``version`` updates."""
        if version > self._version:
            self._version = version
            self._hear(self._task.updated(version))
