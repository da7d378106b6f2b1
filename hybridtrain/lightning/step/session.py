"""What a worker holds while it trains: its parameters in shared memory, its remote optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import is_
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer

from hybridtrain.errors import UserError
from hybridtrain.exchanges import Exchange, LocalExchange, Requirements
from hybridtrain.exchanges.compression import Codec, codec_of
from hybridtrain.lightning.async_training.update_count import last_version, set_global_step
from hybridtrain.lightning.hooks.loop_hooks import accumulates
from hybridtrain.lightning.preflight.strategy_checks import check_parameters
from hybridtrain.lightning.step.accumulation import Accumulation
from hybridtrain.lightning.step.gradient_guard import GradientGuard, OnFault
from hybridtrain.lightning.step.gradient_readers import gradients_are_final
from hybridtrain.lightning.step.gradient_step import GradientStep
from hybridtrain.lightning.step.in_place import NoOptimizer, in_place_step, writes_itself
from hybridtrain.lightning.step.local_step import LocalStep
from hybridtrain.lightning.step.parameter_readers import parameters_rest
from hybridtrain.lightning.step.saved_states import SavedStates
from hybridtrain.lightning.step.shared_buffers import SharedBuffers, room_for, shared
from hybridtrain.lightning.step.trained_parameters import (
    dumped,
    ordered_parameters,
    slot_numbers,
    sparse_numbers,
    sparse_slots,
)
from hybridtrain.lightning.step.worker_step import StepParts, WorkerStep
from hybridtrain.memory import Layout, unpack
from hybridtrain.protocol.messages import Average, Averaged, Install, Row
from hybridtrain.updates.groups import calls_closure, puts_off, takes_sparse
from hybridtrain.updates.named import NamedUpdate
from hybridtrain.worker.client import Client
from hybridtrain.worker.finite import FiniteCheck
from hybridtrain.worker.own_updates.own_steps import OwnSteps
from hybridtrain.worker.replica import Replica
from hybridtrain.worker.replica_cuda import open_replica
from hybridtrain.worker.replica_own import OwnReplica

# Makes the step of one of the module's optimizers, which has this number among them.
MakeStep = Callable[[torch.optim.Optimizer, int, StepParts], WorkerStep]


class Session:
    """Moves the module into shared memory and its optimizers' steps to the server.

    Args:
        client: to the server.
        module: set up and on its device.
        optimizers: as configured by the user.
        requirements: what policy and exchange let everybody rely on.
        exchange: what workers hand over.
        update: how the masters move.
        on_fault: what to do where there is no contribution to make.
        transport: float32 gradients are rounded to this dtype on their way; ``None``: they are not.
    """

    replica: Replica  # this worker's side of the parameters
    _make_step: MakeStep

    def __init__(
        self,
        client: Client,
        module: LightningModule,
        optimizers: Sequence[torch.optim.Optimizer],
        requirements: Requirements,
        exchange: Exchange,
        update: NamedUpdate,
        on_fault: OnFault,
        transport: torch.dtype | None,
    ) -> None:
        self._client, self._module, self._optimizers = client, module, list(optimizers)
        self.trainer: Trainer = module.trainer
        self.written = writes_itself(module, optimizers, requirements.in_place)
        if self.written:
            self._optimizers = [NoOptimizer(module)]
        check_parameters(module)  # again: configure_model may have made some
        named = ordered_parameters(module, self._optimizers)
        self._parameters = [p for _, p in named]
        self._number_of = {id(p): number for number, p in enumerate(self._parameters)}
        self._requirements, self._update = requirements, update
        self.saved = SavedStates(client)
        joint = requirements.parameters == "masters" and client.n_workers > 1
        buffers = shared(module) if joint else []
        # Whoever looks at gradients must see the mean, which only lock-step has at that moment.
        self._unseen = gradients_are_final(module.trainer)
        self.final = self._unseen and not requirements.steps_in_worker
        self.averages = joint and not self.final
        narrow = None if self.averages else transport  # or the mean would be rounded, too
        sparse = sparse_slots(module, self._optimizers, self._number_of)
        layout = Layout.of(named, room_for(buffers), narrow, not self.written, sparse)
        meets = self._may_meet(exchange)
        self._store = store = client.shared_store(layout, requirements, self.averages, meets)
        self._publish()
        client.gather("initial parameters", None)
        store.refresh(client.worker)
        self.buffers = SharedBuffers(buffers, store, client) if buffers else None
        self.share_buffers()
        client.own = OwnSteps.of(client.worker, store)
        self.steps: list[WorkerStep] = []
        self.replica, self._make_step = exchange.worker_steps(self)
        self._means = [store.mean(s) for s in layout.slots] if self.averages else []
        check = FiniteCheck(store, client.worker)
        self.guard = GradientGuard(on_fault, check, layout, module.trainer)
        self._gathered = Accumulation()

    def _may_meet(self, exchange: Exchange) -> bool:
        """Whether an update is one gradient, on the host, stepped by the user's only optimizer."""
        host = self._parameters[0].device.type == "cpu" and codec_of(exchange) is None
        return host and self._unseen and len(self._optimizers) == 1 and self._update.is_users

    # ---- the ways to step, of which the exchange calls one: ``Ways`` in exchanges/exchange.py ----

    def hand_over_gradients(self, codec: Codec | None) -> tuple[Replica, MakeStep]:
        """Raises ``UserError`` if an optimizer compares losses, whose gradients are rounded."""
        for optimizer in () if codec is None else self._optimizers:
            if calls_closure(optimizer):
                raise UserError(
                    f"exchange.compress={codec} was given with {type(optimizer).__name__}, which "
                    "evaluates its closure several times in a step and compares the losses, so "
                    "its gradients must not be rounded; leave it out, or use SGD or Adam"
                )
        client, store = self._client, self._store
        replica = open_replica(self._parameters, store, client.worker, self.final, codec)
        client.meanwhile = replica.meanwhile
        client.meet(store, lambda: [(step.optimizer, step.numbers) for step in self.steps])
        return replica, GradientStep

    def write_to_masters(self, private_state: bool) -> tuple[Replica, MakeStep]:
        """Workers step the masters themselves."""
        replica = open_replica(self._parameters, self._store, self._client.worker, False)
        return replica, partial(in_place_step, self.written, private_state)

    def step_own_parameters(self, exchange: LocalExchange) -> tuple[Replica, MakeStep]:
        """Workers step parameters of their own."""
        keeps = exchange.keeps or self._requirements.whole_rounds
        replica = OwnReplica(self._parameters, self._store, self._client.worker, keeps)
        return replica, partial(LocalStep, replica=replica, exchange=exchange)

    # ---- the beginning of training --------------------------------------------------------------

    @torch.no_grad()
    def _publish(self) -> None:
        """The first worker's parameters become the masters."""
        if not self._client.is_leader or self._client.joins:
            return
        for parameter, slot in zip(self._parameters, self._store.layout.slots, strict=True):
            self._store.master(slot).copy_(parameter)

    def share_buffers(self, accumulating: bool = False) -> None:
        """All have worker 0's buffers now; all must call it."""
        if self.buffers is not None:
            self.buffers.meet(accumulating)

    def install(self) -> None:
        """Training begins: the server takes the optimizers over, with the state they have now."""
        self._publish()  # a hook may have loaded weights
        if self.buffers is not None:
            if self._client.joins:  # it has those of a worker in the middle of a step
                self.buffers.put_back(self.trainer.global_step)
            self.buffers.keep(self.trainer.global_step)
        numbers = self._hand_over(self.trainer.global_step)
        self.replica.writes()  # published already
        self.replica.refresh()
        self.replica.forget()
        self.saved.take_back(self.steps)
        self.replica.follow(n for each in numbers for n in each)
        self.replica.keep_sparse(sparse_numbers(self._optimizers, numbers))

    def _hand_over(self, version: int) -> list[tuple[int, ...]]:
        """Put remote controls into the optimizers; returns their slot numbers.

        Those that have one already (where only others were replaced) stay as they are, here and in
        the server.
        """
        numbers = [slot_numbers(optimizer, self._number_of) for optimizer in self._optimizers]
        known = {id(step): n for n, step in enumerate(self.steps)}
        steps = [vars(optimizer).get("step") for optimizer in self._optimizers]
        own = self._requirements.own_state
        payload = tuple(
            known[id(step)]
            if id(step) in known
            else dumped(self.saved.masters_of(optimizer, self._update, own), self._number_of)
            for step, optimizer in zip(steps, self._optimizers, strict=True)
        )
        mine = payload if self._client.is_leader else ()
        self._client.install(Install(mine, version, last_version(self.trainer)))
        parts = self._parts()
        self.steps = [self._step_of(n, o, parts) for n, o in enumerate(self._optimizers)]
        return numbers

    def gather_states(self) -> None:
        """All meet, see the masters, and the one who saves gets what is each worker's own."""
        self.saved.gather(self.steps)
        self.catch_up()

    def end_saving(self, shows: bool) -> None:
        """The checkpoint is written: own parameters again, unless masters were shown before."""
        self.saved.forget()
        if not shows:
            self.put_back()

    @property
    def shows_masters(self) -> bool:
        """Whether the module has them instead of this worker's own parameters."""
        return self.replica.shows_masters

    def _parts(self) -> StepParts:
        wants, endless = self._requirements, last_version(self.trainer) is None
        counts = partial(set_global_step, self.trainer)
        return StepParts(
            self._client,
            self.replica,
            self.guard,
            self._update,
            wants,
            self._number_of,
            self._gathered,
            self.buffers,
            averaged=self.averages,
            manual=not self._module.automatic_optimization,
            released=(lambda version: None) if wants.whole_rounds else counts,
            goes_ahead=wants.may_go_ahead
            and endless
            and self._unseen
            and parameters_rest(self.trainer),
            endless=endless,
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
        """Training is over: Lightning will move states to the CPU, which lie there already."""
        for step in self.steps:
            step.close()
        self._client.meanwhile = None
        self.replica.close()

    def _replace(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """The user has put other optimizers into the trainer, in the same step of all workers."""
        self._optimizers = list(optimizers)
        numbers = self._hand_over(max(step.version for step in self.steps))
        for optimizer, inside in zip(self._optimizers, numbers, strict=True):
            self.replica.admit(inside, takes_sparse(optimizer))

    def number_of(self, optimizer: torch.optim.Optimizer) -> int | None:
        """Its place among those that training has stepped."""
        places = (n for n, step in enumerate(self.steps) if step.optimizer is optimizer)
        return next(places, None)

    def snapshot(
        self, reach: Callable[[int], object] = int, between: bool = False
    ) -> list[dict[str, Any]]:
        """Each optimizer's ``state_dict()`` at one version. Parameters are brought to it, unless
        user code has changed them (averaged weights, swapped in): those are to be saved. ``reach``
        brings schedules, and so the learning rates, to it. ``between``: workers run freely now.
        """
        self._client.settle()
        if between:
            self.replica.hold_masters()
        changed = bool(self.replica.writes())
        version, saved = self._client.snapshot(refresh=not changed)
        if not changed:
            self.replica.refresh(keep=between)
        reach(version)
        states = [s.state_dict(each) for s, each in zip(self.steps, saved, strict=True)]
        return self.saved.with_inner(states)

    def pull(self) -> int:
        """Bring the module's parameters up to date; their version."""
        self._client.settle()
        version = self._client.pull(self.replica.writes())
        self.replica.refresh()
        return version

    def begin_batch(self, batch: Any, samples: float, together: float | None) -> None:
        """A mini-batch begins; gradients add up until the next step.

        Args:
            batch: as the user's module will see it.
            samples: in it.
            together: samples of all workers in this step, if that is known.
        """
        self.put_back()
        self.guard.begin(batch, self._gathered.stepped)
        joint = self._module.automatic_optimization and not self.has_own_parameters
        self._gathered.begin(samples, together if joint else None)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss of the mini-batch as it is to count among those that are accumulated."""
        return loss if self._gathered.scale == 1.0 else loss * self._gathered.scale

    def optimizer_step(self, number: int, run: Callable[[], Any]) -> Any:
        """Let Lightning step one; where workers run freely, others have stepped meanwhile."""
        now = self.trainer.optimizers
        if len(now) != len(self._optimizers) or not all(map(is_, now, self._optimizers)):
            self._replace(now)
        step = self.steps[number]
        count = step.count
        output = run()
        if step.count == count:
            step.skip()  # the precision plugin did
        if not self._requirements.whole_rounds:
            set_global_step(self.trainer, step.version - (self._client.unsettled is None))
        return output

    def count_written(self) -> None:
        """The module has written to the parameters: that was an update of this mini-batch."""
        step = self.steps[0]
        step()
        set_global_step(self.trainer, step.version)

    @property
    def has_own_parameters(self) -> bool:
        """Whether this worker's optimizers move parameters of its own."""
        return self._requirements.parameters == "own"

    @property
    def has_own_state(self) -> bool:
        """Whether a checkpoint needs something of each worker."""
        return self.has_own_parameters or self.replica.encoder is not None

    def put_back(self) -> None:
        """Training goes on: what the module had for others to see is put away."""
        self.replica.put_back()

    @property
    def has_gathered(self) -> bool:
        """Whether gradients wait for the next step."""
        return self._gathered.waits

    def sit_out(self) -> None:
        """The others make a step, in automatic optimization, for which this worker has no data."""
        self.put_back()
        for step in self.steps if self.has_own_parameters else ():
            step.skip()

    @property
    def owes(self) -> bool:
        """Whether the masters lack steps that all workers have made since the last exchange.

        Who goes on from a checkpoint that one worker makes alone now does them again.
        """
        return self._requirements.whole_rounds and any(step.owes for step in self.steps)

    def catch_up(self) -> None:
        """In lock-step, behind a step of all: see the masters, with what the server has put off."""
        if self.has_own_parameters:
            self.replica.refresh()
        elif any(map(puts_off, self._optimizers)):
            self.pull()

    def flush(self, ends: bool = False) -> None:
        """Hand over what this worker's own steps have come to, where all do so."""
        self.put_back()  # a checkpoint may have been made since the last step
        for step in self.steps:
            step.flush(ends)

    def await_turn(self) -> int:
        """Wait until no other worker computes, and the parameters are the newest; their version."""
        version = self._client.begin(self.replica.writes())
        self.replica.refresh()
        return version

    def accumulates(self) -> bool:
        """Whether this backward only adds to gradients that a later mini-batch will step."""
        return self._module.automatic_optimization and accumulates(self.trainer)

    @torch.no_grad()
    def average(self) -> None:
        """Every worker's ``.grad`` becomes the mean of all, weighted by samples."""
        trained = {n: p for n, p in enumerate(self._parameters) if p.requires_grad}
        slots, worker = self._store.layout.slots, self._client.worker
        absent = self.replica.collect(tuple(trained))
        packed, finite = self.replica.packed, self.replica.finite
        trying = any(step.trying for step in self.steps)
        looks = not trying and self.replica.encoded is None
        if looks and not self.guard.accepts(tuple(trained), absent, packed, finite):
            self._gathered.clear()
        if (encoded := self.replica.encoded) is None:
            for number in absent:
                self._store.gradient(worker, slots[number]).zero_()
        else:  # the server brings what is encoded to all the other places
            absent = tuple(n for n in range(len(slots)) if n not in trained or n in absent)
        request = Average(self._gathered.weight, Row(absent, packed, encoded))
        self._take_means(trained, self._client.average(request))

    def _take_means(self, trained: dict[int, torch.nn.Parameter], averaged: Averaged) -> None:
        """Copy the server's means to every ``.grad``."""
        sparse = {each.number: each for each in averaged.packed}
        gradients, sources = [], []
        for number in sorted(trained.keys() - set(averaged.absent)):
            parameter, mean = trained[number], self._means[number]
            if number in sparse:
                parameter.grad = unpack(sparse[number], mean).to(parameter.device, copy=True)
                continue
            if parameter.grad is None or parameter.grad.is_sparse:
                parameter.grad = torch.empty_like(parameter)
            gradients.append(parameter.grad)
            sources.append(mean)
        self.replica.take_means(gradients, sources)

    def _abstain(self) -> None:
        """This mini-batch has no gradient (``training_step`` returned ``None``).

        What earlier mini-batches have accumulated still counts.
        """
        self._gathered.leave_out()
        if self.averages and self._gathered.weight > 0 and not self.accumulates():
            self.average()  # no backward will do it

    def training_step(self, step: Callable[[], Any]) -> Any:
        """Run the user's; ``None``, as if it had returned that, where a fault is forgiven."""
        automatic = self._module.automatic_optimization
        try:
            output = step()
        except Exception as error:
            # Under manual optimization others already wait for steps that would not come.
            if not automatic or not self.guard.forgives(error):
                raise
            output = None
        if output is None and automatic:
            self._abstain()
        return output

    def backward(self, run: Callable[[], torch.Tensor], loss: torch.Tensor) -> torch.Tensor:
        """Run it; where it is broken off and that is forgiven, nothing accumulated counts."""
        for step in self.steps if self._requirements.watches_loss else ():
            step.watch(loss.detach())
        self.guard.see(loss)
        self.replica.adding = self.accumulates()
        try:
            return run()
        except Exception as error:
            if not self.guard.forgives(error):
                raise
        for parameter in self._parameters:
            parameter.grad = None
        self._gathered.clear()
        return loss.detach()
