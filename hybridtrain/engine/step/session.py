"""A worker's session: it moves parameters to shared memory and hands steps to the server."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from hybridtrain.engine.exchanges import Exchange, LocalExchange, Requirements
from hybridtrain.engine.exchanges.compression import Codec, codec_of
from hybridtrain.engine.memory import Layout, Slot
from hybridtrain.engine.protocol.messages import Install
from hybridtrain.engine.step.accumulation import Accumulation
from hybridtrain.engine.step.gradient_step import GradientStep
from hybridtrain.engine.step.guard import Guard, OnFault
from hybridtrain.engine.step.in_place import in_place_step
from hybridtrain.engine.step.local_step import LocalStep
from hybridtrain.engine.step.shared_buffers import Named, SharedBuffers, room_for
from hybridtrain.engine.step.trained_parameters import (
    dumped,
    slot_numbers,
    sparse_numbers,
)
from hybridtrain.engine.step.worker_step import StepParts, WorkerStep
from hybridtrain.engine.updates.groups import calls_closure
from hybridtrain.engine.updates.named import NamedUpdate
from hybridtrain.engine.worker.client import Client
from hybridtrain.engine.worker.device import KINDS
from hybridtrain.engine.worker.finite import FiniteCheck
from hybridtrain.engine.worker.host_group import HostGroup
from hybridtrain.engine.worker.open_replica import open_replica
from hybridtrain.engine.worker.replica import Replica
from hybridtrain.engine.worker.replica_own import OwnReplica
from hybridtrain.errors import UserError
from hybridtrain.util.option_types import as_typed

# Makes the step of one of the optimizers, which has this number among them.
MakeStep = Callable[[torch.optim.Optimizer, int, StepParts], WorkerStep]


@dataclass(frozen=True)
class Trained:
    """The parameters and optimizers of a session, and the uses that user code makes of them.

    Args:
        named: the parameters, those of the optimizers first and group by group.
        optimizers: as configured by the user.
        buffers: of which all workers have the first one's.
        sparse: numbers of parameters whose gradients are a few rows.
        transport: float32 gradients are rounded to this dtype on their way; ``None``: they are not.
        unseen: no user code looks at gradients between backward and step.
        final: gradients are what backward has made of them; else they are read at the push.
        averages: all workers' gradients are averaged before they are handed over.
        written: user code steps the parameters itself, without an optimizer.
        replaced: new processes take the places of workers that are lost, in the middle of an epoch.
    """

    named: Sequence[tuple[str, torch.nn.Parameter]]
    optimizers: Sequence[torch.optim.Optimizer]
    buffers: Named = field(default_factory=list)
    sparse: Collection[int] = ()
    transport: torch.dtype | None = None
    unseen: bool = True
    averages: bool = False
    written: bool = False
    final: bool = True
    replaced: bool = False


class WorkerSession:
    """Moves parameters into shared memory and their optimizers' steps to the server.

    Args:
        client: to the server.
        trained: what is trained.
        requirements: what policy and exchange let everybody rely on.
        exchange: what workers hand over.
        update: how the masters move.
        on_fault: what to do where there is no contribution to make.
    """

    replica: Replica  # this worker's side of the parameters
    _make_step: MakeStep

    def __init__(
        self,
        client: Client,
        trained: Trained,
        requirements: Requirements,
        exchange: Exchange,
        update: NamedUpdate,
        on_fault: OnFault,
    ) -> None:
        self._client, self._trained = client, trained
        self._optimizers = list(trained.optimizers)
        self._parameters = [parameter for _, parameter in trained.named]
        self._number_of = {id(p): number for number, p in enumerate(self._parameters)}
        self._requirements, self._update = requirements, update
        room = room_for(trained.buffers)
        sends = not trained.written
        layout = Layout.of(trained.named, room, trained.transport, sends, trained.sparse)
        means = trained.averages or requirements.together > 1
        parts = self._stepped, means, self._workers_may_update(exchange), self._stages()
        self._store = store = client.shared_store(layout, requirements, *parts)
        self._group = self._made_group()
        self._publish()
        client.gather("initial parameters", None)
        if not client.group.joins:
            store.refresh(client.worker)
        self.buffers = SharedBuffers(trained.buffers, store, client) if trained.buffers else None
        self.share_buffers()
        self.steps: list[WorkerStep] = []
        self.replica, self._make_step = exchange.worker_steps(self)
        self.guard = self._make_guard(on_fault, FiniteCheck(store, client.worker), layout)
        self._gathered = Accumulation()

    def _made_group(self) -> HostGroup | None:
        together = self._requirements.together
        return None if together == 1 else HostGroup(self._client, self._store, together)

    def _make_guard(self, on_fault: OnFault, check: FiniteCheck, layout: Layout) -> Guard:
        """Make the guard, which checks gradients before they are handed over."""
        return Guard(on_fault, check, layout, self.where)

    def where(self) -> str:
        """Which worker this is, and where training is."""
        return f"worker {self._client.worker}"

    @property
    def final(self) -> bool:
        """Whether gradients stay what backward has made them until the server has them."""
        trained = self._trained
        return trained.unseen and trained.final and not self._requirements.steps_in_worker

    def _stepped(self) -> list[tuple[torch.optim.Optimizer, tuple[int, ...]]]:
        """The optimizers, each with the slot numbers of its parameters."""
        return [(step.optimizer, step.numbers) for step in self.steps]

    def _workers_may_update(self, exchange: Exchange) -> bool:
        """Whether an update is one gradient, on the host, stepped by the user's only optimizer."""
        host = self._parameters[0].device.type == "cpu" and codec_of(exchange) is None
        only = len(self._optimizers) == 1 and self._update.is_users
        return host and self._trained.unseen and only

    def _stages(self) -> bool:
        comes = self._client.apart or self._trained.replaced
        on_device = self._parameters[0].device.type in KINDS
        return self._requirements.stages_on_device(on_device, comes)

    # ---- ``StepFactory`` of exchanges/exchange.py: the exchange calls one of these --------------

    def hand_over_gradients(self, codec: Codec | None) -> tuple[Replica, MakeStep]:
        """Raises ``UserError`` if an optimizer compares losses, and cannot do so here."""
        for optimizer in self._optimizers:
            if calls_closure(optimizer) and slot_numbers(optimizer, self._number_of):
                self._check_evaluations(type(optimizer).__name__, codec)
        client, store = self._client, self._store
        leads = self._leads
        replica = open_replica(self._parameters, store, client.worker, self.final, codec, leads)
        client.listeners.while_waiting(replica.meanwhile)
        return replica, GradientStep

    def _check_evaluations(self, optimizer: str, codec: Codec | None) -> None:
        if self._requirements.delay:
            raise UserError(
                f"optimizer {optimizer} was given, which evaluates its closure several times in a "
                "step at parameters that stand still meanwhile, but under this policy workers are "
                "one update behind (pipe_sgd); use policy=hybrid, or SGD or Adam"
            )
        if codec is not None:
            raise UserError(
                f"exchange.compress={as_typed(codec)} was given with {optimizer}, which evaluates "
                "its closure several times in a step and compares the losses, so its gradients "
                "must not be rounded; leave it out, or use SGD or Adam"
            )

    def _leads(self) -> bool:
        return self._client.group.is_leader

    def write_to_masters(self, private_state: bool) -> tuple[Replica, MakeStep]:
        """Workers step the masters themselves."""
        replica = open_replica(self._parameters, self._store, self._client.worker, False)
        return replica, partial(in_place_step, self._trained.written, private_state)

    def step_own_parameters(self, exchange: LocalExchange) -> tuple[Replica, MakeStep]:
        """Workers step parameters of their own."""
        keeps = exchange.keeps or self._requirements.whole_rounds
        gives = exchange.update == "user"  # gradients, which the user's optimizer steps
        sends = not (exchange.keeps or gives or self._requirements.evaluates)
        alike = self._requirements.whole_rounds or self._client.n_workers == 1
        sends &= alike and self._client.worker == 0
        replica = OwnReplica(
            self._parameters, self._store, self._client.worker, keeps, gives, sends
        )
        group = self._group
        return replica, partial(LocalStep, replica=replica, exchange=exchange, group=group)

    # ---- the beginning of training --------------------------------------------------------------

    @torch.no_grad()
    def _publish(self) -> None:
        """The first worker's parameters become the masters."""
        if not self._client.group.is_leader or self._client.group.joins:
            return
        for parameter, slot in zip(self._parameters, self._store.layout.slots, strict=True):
            self._store.master(slot).copy_(parameter)

    def share_buffers(self, accumulating: bool = False) -> None:
        """All have worker 0's buffers now; all must call it."""
        if self.buffers is not None:
            self.buffers.meet(accumulating)

    def begin(self, version: int, last: int | None = None) -> None:
        """Training begins: the server takes the optimizers over, with the state they have now.

        Args:
            version: updates so far.
            last: the largest version, if the server enforces one.
        """
        self._publish()  # user code may have loaded weights
        joins = self._client.group.joins
        if self.buffers is not None and not joins:
            self.buffers.keep(version)
        if self.has_own_parameters:  # those of a search for a learning rate remember its steps
            self.steps = []
        if self.replica.encoder is not None:
            self.replica.encoder.forget()
        numbers = self._install_optimizers(version, last)
        if self.buffers is not None and joins:  # it has those of a worker in the middle of a step
            self.buffers.put_back(version)
            self.buffers.keep(version)
        self.replica.writes()  # published already
        self.replica.refresh()
        self.replica.forget()
        self._is_handed_over()
        self.replica.follow(n for each in numbers for n in each)
        self.replica.keep_sparse(sparse_numbers(self._optimizers, numbers))

    def _install_optimizers(self, version: int, last: int | None = None) -> list[tuple[int, ...]]:
        """Replace each ``optimizer.step`` with a ``WorkerStep``; returns the slot numbers.

        The leader sends the optimizers to the server. Those that have a step of this session
        (where only others were replaced) stay as they are, here and in the server.
        """
        numbers = [slot_numbers(optimizer, self._number_of) for optimizer in self._optimizers]
        known = {id(step): n for n, step in enumerate(self.steps)}
        steps = [vars(optimizer).get("step") for optimizer in self._optimizers]
        payload = tuple(
            known[id(step)]
            if id(step) in known
            else dumped(self._masters_of(optimizer), self._number_of)
            for step, optimizer in zip(steps, self._optimizers, strict=True)
        )
        mine = payload if self._client.group.is_leader else ()
        self._client.install(Install(mine, version, last))
        parts = self._parts()
        self.steps = [self._step_of(n, o, parts) for n, o in enumerate(self._optimizers)]
        return numbers

    def _masters_of(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Make the optimizer that steps the masters, with its state when training begins."""
        return self._update.beside(optimizer, self._requirements.own_state)

    def _is_handed_over(self) -> None:
        """The server has the optimizers, and the worker's parameters are the masters."""

    def _parts(self) -> StepParts:
        return StepParts(
            self._client,
            self.replica,
            self.guard,
            self._update,
            self._requirements,
            self._number_of,
            self._gathered,
            self.buffers,
            averaged=self._trained.averages,
            only=len(self._optimizers) == 1,
        )

    def _step_of(
        self, number: int, optimizer: torch.optim.Optimizer, parts: StepParts
    ) -> WorkerStep:
        """The step of one optimizer: a new one, unless the optimizer has one of this session."""
        step = vars(optimizer).get("step")
        if not isinstance(step, WorkerStep) or step not in self.steps:
            step = self._make_step(optimizer, number, parts)
            optimizer.step = step  # type: ignore[method-assign]
            # Or a fused one is taken to unscale gradients in its step, which is sent away.
            vars(optimizer)["_step_supports_amp_scaling"] = False
        step.renumber(number, parts.only)
        return step

    def close(self) -> None:
        """Training is over: states lie in host memory."""
        for step in self.steps:
            step.close()
        self._client.listeners.while_waiting(None)
        self.replica.close()

    # ---- in training ----------------------------------------------------------------------------

    @property
    def has_own_parameters(self) -> bool:
        """Whether this worker's optimizers move parameters of its own."""
        return self._requirements.parameters == "own"

    @property
    def has_own_state(self) -> bool:
        """Whether a checkpoint needs something of each worker."""
        return self.has_own_parameters or self.replica.encoder is not None

    @property
    def shows_masters(self) -> bool:
        """Whether the module has the masters instead of this worker's own parameters."""
        return self.replica.shows_masters

    def put_back(self) -> None:
        """Restore the worker's own parameters in the module, if it has the masters."""
        self.replica.put_back()

    def begin_samples(self, samples: float, together: float | None = None) -> None:
        """A mini-batch begins, whose gradients add up until the next step.

        Args:
            samples: in it.
            together: samples of all workers in this step, if that is known.
        """
        self.put_back()
        self._gathered.begin(samples, together)

    def begin_more(self, samples: float) -> None:
        """The next step weighs as much as so many samples, which an earlier step has counted."""
        self.begin_samples(samples)
        self._gathered.pop_samples()

    def go_on(self, samples: float) -> None:
        """The next step is a later one of the same mini-batch, for so many samples of its own."""
        self.put_back()
        self._gathered.go_on(samples)

    def pull(self) -> int:
        """Bring the parameters up to date; their version."""
        self._client.pushes.settle()
        version = self._client.pull(self.replica.writes())
        self.replica.refresh()
        return version

    def show_newest(self) -> None:
        """The module has the newest parameters, until training goes on from what it has."""
        self._client.pushes.settle()
        if self._store.turns is not None and self._store.turns.behind:
            self.replica.writes()  # raises, if user code has written to any
            self._client.await_masters()
            self.replica.show_masters()

    @torch.no_grad()
    def resume_behind(self, read: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Training goes on one update behind.

        Args:
            read: by number, a parameter as workers compute with it, and as they will with the next
                release where that is not the master.
        """
        n_held = min(map(len, read.values()), default=0)
        if self._store.turns is None or not n_held or self._client.group.joins:
            return
        slots = self._store.layout.slots
        for number, values in read.items():
            check_shape(slots[number], values)
        buffers = self._store.turns.resume(n_held)
        for number, values in read.items():
            slot = slots[number]
            for buffer, value in zip(buffers, values, strict=False):
                slot.view(buffer[slot.dtype][slot.offset :][: slot.numel]).copy_(value)
        self._client.gather("parameters of one update before", None)  # before any goes on
        self.replica.resume(read)

    def sit_out(self) -> None:
        """The others make a step for which this worker has no data."""
        self.put_back()
        for step in self.steps if self.has_own_parameters else ():
            step.skip()

    @property
    def has_unsent(self) -> bool:
        """Whether the masters lack steps that all workers have made since the last exchange.

        A run that is resumed from a checkpoint that one worker writes now repeats them.
        """
        return self._requirements.whole_rounds and any(step.has_unsent for step in self.steps)

    def flush(self, ends: bool = False) -> None:
        """Push the result of this worker's own steps. In lock-step all workers call it.

        ``ends``: the epoch or training ends.
        """
        self.put_back()  # a checkpoint may have been made since the last step
        for step in self.steps:
            step.flush(ends)
        if ends and (writes := self.replica.unsent()):
            self._client.pushes.settle()
            self._client.pull(writes)
            self.replica.refresh()

    def end_epoch(self, n: int) -> None:
        """All workers have ended n epochs."""
        self._store.end_epoch(n)

    def await_turn(self) -> int:
        """Wait until no other worker computes, and the parameters are the newest; their version."""
        version = self._client.begin(self.replica.writes())
        self.replica.refresh()
        return version


def check_shape(slot: Slot, values: Sequence[torch.Tensor]) -> None:
    """Refuse a parameter of another shape, as workers of the saved run have computed with it.

    Raises:
        UserError: naming both shapes.
    """
    for value in values:
        if value.shape != slot.shape:
            raise UserError(
                f"the checkpoint has {slot.name} with shape {tuple(value.shape)} as workers "
                f"computed with it, but the model has {tuple(slot.shape)}; give a checkpoint of "
                "this model"
            )
