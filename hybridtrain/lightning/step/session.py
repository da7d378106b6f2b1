"""A worker's session under Lightning's loops: the module's steps, hooks, accumulation, faults."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import is_
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.core.optimizer import do_nothing_closure
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.weak import TensorWeakRef

from hybridtrain.engine.memory import Layout, unpack
from hybridtrain.engine.memory.store import tensor_of
from hybridtrain.engine.protocol.messages import Average, Averaged, Clip, Row, Writes
from hybridtrain.engine.scheme import Scheme
from hybridtrain.engine.step.guard import Guard, OnFault
from hybridtrain.engine.step.session import Trained, WorkerSession
from hybridtrain.engine.step.shared_buffers import shared
from hybridtrain.engine.step.trained_parameters import ordered_parameters, sparse_slots
from hybridtrain.engine.step.worker_step import StepParts, WorkerStep
from hybridtrain.engine.updates import SavedOptimizer
from hybridtrain.engine.updates.groups import puts_off, takes_sparse
from hybridtrain.engine.worker.finite import FiniteCheck
from hybridtrain.engine.worker.tickets import NotNeeded
from hybridtrain.lightning.device_memory import DeviceUse
from hybridtrain.lightning.hooks.loop_hooks import accumulates
from hybridtrain.lightning.hooks.trainer_hooks import scaler_of
from hybridtrain.lightning.step.foreign_steps import ForeignSteps
from hybridtrain.lightning.step.gradient_guard import GradientGuard, beside
from hybridtrain.lightning.step.overridden_hooks import (
    gradients_are_final,
    is_hooked,
    parameters_rest,
)
from hybridtrain.lightning.step.saved_states import SavedStates
from hybridtrain.lightning.update_count import set_global_step
from hybridtrain.lightning.worker_context import WorkerContext


class Session(WorkerSession):
    """Moves the module into shared memory and its optimizers' steps to the server.

    Args:
        worker: this one.
        module: set up and on its device.
        scheme: exchange, update, and what is done about gradients that are not finite.
        transport: the type of gradients on their way; ``None``: their own.
        use: of the device by this worker.
    """

    guard: GradientGuard
    _has_mean = False  # the gradients of this step are the mean of this host's
    _has_met = True  # and has begun no mini-batch since

    def __init__(
        self,
        worker: WorkerContext,
        module: LightningModule,
        scheme: Scheme,
        transport: torch.dtype | None,
        use: DeviceUse,
    ) -> None:
        self._module, self._worker, self._use = module, worker, use
        self.trainer: Trainer = module.trainer
        client, requirements = worker.client, worker.requirements
        self.written = writes_itself(module, self.trainer.optimizers, requirements.in_place)
        stepped = [NoOptimizer(module)] if self.written else list(self.trainer.optimizers)
        named = ordered_parameters(module, stepped)
        number_of = {id(p): number for number, (_, p) in enumerate(named)}
        alike = requirements.together if requirements.means_gradients else 1
        self.saved = SavedStates(client, client.worker - client.worker % alike)
        joint = requirements.parameters == "masters" and client.n_workers > 1
        # A hook that looks at gradients must see the mean, which only lock-step has then.
        unseen = gradients_are_final(module.trainer)
        shown = joint and not (unseen and not requirements.steps_in_worker)
        self.averages = shown or requirements.means_gradients
        # Its state follows from the mean, so each worker steps it with that, also without data.
        self._scaler = scaler_of(self.trainer)
        self._by_hand = self.averages and not module.automatic_optimization
        self.scales = self._scaler is not None and self.averages and not self._by_hand
        self._broken_off = False  # this step's backward, which was forgiven
        self._look_at_hooks(requirements.backs_up)
        trained = Trained(
            named,
            stepped,
            shared(module) if joint else [],
            sparse_slots(module, stepped, number_of),
            None if self.averages else transport,  # or the mean would be rounded, too
            unseen,
            self.averages,
            self.written,
            replaced=worker.on_failure.tells,
        )
        self._foreign = ForeignSteps(module, named, stepped, requirements, client.n_workers)
        on_fault = beside(scheme.on_fault, self.trainer)
        super().__init__(client, trained, requirements, scheme.exchange, scheme.update, on_fault)
        slots = self._store.layout.slots
        self._means = [self._store.mean(slot) for slot in slots] if self.averages else []
        self._meant = Meant(self._parameters if self._by_hand else [])

    def _look_at_hooks(self, backs_up: bool) -> None:
        if backs_up:  # Lightning's, of a mini-batch that another worker has processed
            warnings.filterwarnings("ignore", ".*training_step.*returned.*None")
        behind = "on_train_batch_end", "on_before_zero_grad", "optimizer_step"
        self._hooked_behind_step = is_hooked(self.trainer, *behind)
        self._hooked_at_start = is_hooked(self.trainer, "on_train_batch_start")

    def backward_and_average(self, proceed: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """User code reads gradients: give all workers the mean after backward."""
        proceed(*args, **kwargs)
        if self.steps and not self.accumulates():
            self.average()

    def record_clip(
        self,
        proceed: Callable[..., None],
        optimizer: Any,
        clip_val: float = 0.0,
        gradient_clip_algorithm: Any = "norm",
    ) -> None:
        """No user code reads gradients: let the server clip the mean."""
        if clip_val and clip_val > 0:
            algorithm = str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm))
            for step in self.steps:
                step.clip_next(Clip(algorithm, float(clip_val)))

    def measure_device(self) -> None:
        """Measure this worker's need of its device."""
        self._use.measure()

    def _make_guard(self, on_fault: OnFault, check: FiniteCheck, layout: Layout) -> Guard:
        return GradientGuard(
            on_fault, check, layout, self.trainer, self._use, self._worker.collectives
        )

    # ---- the beginning of training --------------------------------------------------------------

    def install(self) -> None:
        """Training begins: the server takes the optimizers over, with the state they have now."""
        self.begin(self.trainer.global_step, self._last_version)

    @property
    def _last_version(self) -> int | None:
        """The user's limit of updates, where Lightning's own counting would not keep it."""
        limit = self.trainer.max_steps
        return None if self._requirements.counts == "worker" or limit == -1 else limit

    def close(self) -> None:
        super().close()
        self._foreign.close()
        self._meant.close()

    def _is_handed_over(self) -> None:
        self.saved.take_back(self.steps)
        self.resume_behind(self.saved.take_read(self.steps))

    def _masters_of(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return self.saved.masters_of(optimizer, self._update, self._requirements.own_state)

    def gather_states(self, numbers: Any) -> dict[int, Any]:
        """Collective: show the masters, and gather each worker's own state at the saving worker.

        Returns there the random ``numbers`` of each.
        """
        numbers_of = self.saved.gather(self.steps if self.has_own_state else (), numbers)
        if self.has_own_state:
            self.catch_up()
        return numbers_of

    def end_saving(self, shows: bool) -> None:
        """The checkpoint is written: own parameters again, unless masters were shown before."""
        self.saved.forget()
        if not shows:
            self.put_back()

    def _parts(self) -> StepParts:
        wants, endless = self._requirements, self._last_version is None
        counts = partial(set_global_step, self.trainer)
        ahead = wants.may_go_ahead and endless and self._trained.unseen
        return replace(
            super()._parts(),
            manual=not self._module.automatic_optimization,
            released=(lambda version: None) if wants.whole_rounds else counts,
            complete=self.average_own,
            goes_ahead=ahead and parameters_rest(self.trainer, self._worker.on_failure.tells),
            endless=endless,
            nothing=do_nothing_closure,
        )

    def _replace(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """The user has put other optimizers into the trainer, in the same step of all workers."""
        self._optimizers = list(optimizers)
        numbers = self._install_optimizers(
            max(step.version for step in self.steps), self._last_version
        )
        for optimizer, inside in zip(self._optimizers, numbers, strict=True):
            self.replica.admit(inside, takes_sparse(optimizer))

    def number_of(self, optimizer: torch.optim.Optimizer) -> int | None:
        """Its place among those that training has stepped."""
        places = (n for n, step in enumerate(self.steps) if step.optimizer is optimizer)
        return next(places, None)

    def snapshot(
        self, reach: Callable[[int], object] = int, between: bool = False
    ) -> list[dict[str, Any]]:
        """Each optimizer's ``state_dict()`` at one version. The parameters become those of that
        version, unless user code has swapped in others (averaged weights), which it saves.

        ``reach`` brings schedules, and so rates, to it. ``between``: workers run freely now.
        """
        self._client.pushes.settle()
        if between:
            self.replica.hold_masters()
        self.show_newest()
        changed = bool(self.replica.writes()) or (self._has_met and bool(self.replica.changed()))
        changed |= self._requirements.delay > 0  # or all would go on from the newest
        version, saved = self._client.snapshots.take(refresh=not changed)
        if changed:
            self._client.steps.reach(version)
        else:
            self.replica.refresh(keep=between)
        reach(version)
        pairs = zip(self.steps, saved, strict=True)
        states = [s.state_dict(self._unscheduled(s, x)) for s, x in pairs]
        return self.saved.with_read(self.saved.with_inner(states), self.steps, self.replica)

    def _unscheduled(self, step: WorkerStep, saved: SavedOptimizer) -> SavedOptimizer:
        """Leave out rates that a schedule on a plateau moves: the server has those of the last
        push, perhaps of a worker that had not heard of a call. (Others mark their groups.)
        """
        for schedule in (config.scheduler for config in self.trainer.lr_scheduler_configs):
            if isinstance(schedule, ReduceLROnPlateau) and schedule.optimizer is step.optimizer:
                left = ({k: v for k, v in g.items() if k != "lr"} for g in saved.groups)
                return replace(saved, groups=tuple(left))
        return saved

    def meet(self) -> int:
        """All workers meet, at the same parameters; their version."""
        self._client.pushes.settle()
        written = self._is_written
        version = self._client.pull(self.replica.writes())
        self._see_masters(written)
        return version

    @property
    def _is_written(self) -> bool:
        """Whether hooks have written to a worker's own parameters since all met."""
        return self.has_own_parameters and self._has_met and bool(self.replica.changed())

    def _see_masters(self, written: bool) -> None:
        """Show them, but what hooks have ``written``."""
        if not written:
            self.replica.refresh()
        self._has_met = not self._requirements.evaluates  # or own parameters are a trial point

    def put_back(self) -> None:
        """Restore the worker's own parameters, which the masters are not to be compared with."""
        self._has_met &= not self.replica.shows_masters
        super().put_back()

    def send_writes(self, starts: bool = False) -> int | None:
        """Send what hooks have written to parameters: soon, since other workers may do the same.

        Hooks between a meeting and the next mini-batch run in all workers, as on one device. Their
        writes count once, and those of a worker that is restarted not again. ``starts``: hooks at
        the start of a mini-batch, else behind a step. Returns the version of the parameters if
        they were brought up to date.
        """
        alike = self._has_met
        hooked = self._hooked_at_start if starts else self._hooked_behind_step
        if not (self._store.private_parameters and (alike or hooked)):
            return None
        for step in self.steps:  # what was written to parameters that an optimizer has just got
            step.admit()
        if not self.replica.written(alike):  # before a release is awaited
            return None
        self._client.pushes.settle()
        again = alike and self._client.group.joins
        version = None if again else self._client.pull(self.replica.written(alike), alike)
        self.replica.refresh()
        return version

    @torch.no_grad()
    def repeat(self, writes: Writes) -> None:
        """Make the writes to parameters that hooks of another worker's mini-batch have made."""
        for number, value in writes.items():
            own = self._parameters[number].data
            own.copy_(tensor_of(value, own.dtype, own.shape))

    def left_gradients(self) -> dict[int, torch.Tensor | None]:
        """Under manual optimization, every ``.grad`` behind a mini-batch; else nothing."""
        if self._module.automatic_optimization or not self.averages:
            return {}
        found = [(n, p.grad) for n, p in enumerate(self._parameters) if p.requires_grad]
        return {n: None if gradient is None else gradient.cpu() for n, gradient in found}

    def take_gradients(self, gradients: Mapping[int, torch.Tensor | None]) -> None:
        """Set every ``.grad`` to that of another worker, behind a mini-batch without this one."""
        for number, value in gradients.items():
            parameter = self._parameters[number]
            parameter.grad = None if value is None else value.to(parameter.device)

    @contextmanager
    def keeping_writes(self) -> Iterator[None]:
        """Keep what hooks have written to a worker's own parameters since all met."""
        numbers = self.replica.changed() if self._has_met else []
        kept = [(self._parameters[number], self._parameters[number].clone()) for number in numbers]
        yield
        for parameter, value in kept:
            parameter.data.copy_(value)

    def begin_batch(self, batch: Any, samples: float, together: float | None) -> float:
        """A mini-batch begins; gradients add up until the next step. Returns what it counts for.

        Args:
            batch: as the user's module will see it.
            samples: in it.
            together: samples of all workers in this step, if that is known.
        """
        self._has_met = self._broken_off = False
        self._meant.begin_batch()
        self.guard.begin(batch, self._gathered.stepped)
        joint = self._module.automatic_optimization and not self.has_own_parameters
        self.begin_samples(samples, together if joint else None)
        return self._gathered.running

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
            set_global_step(self.trainer, step.version - (self._client.steps.unsettled is None))
        return output

    def count_written(self) -> None:
        """The module has written to the parameters: that was an update of this mini-batch."""
        step = self.steps[0]
        step()
        set_global_step(self.trainer, step.version)

    @property
    def has_gathered(self) -> bool:
        """Whether gradients wait for the next step."""
        return self._gathered.waits

    def catch_up(self, ends: bool = False) -> None:
        """In lock-step, behind a step of all: see the masters, with what the server has put off.

        ``ends``: an epoch ends here, so all go on from the newest parameters.
        """
        if self.has_own_parameters:
            self._see_masters(self._is_written)
        elif self._requirements.delay and not ends:
            self.show_newest()
        elif self._requirements.delay or any(map(puts_off, self._optimizers)):
            self.pull()

    def accumulates(self) -> bool:
        """Whether this backward only adds to gradients that a later mini-batch will step."""
        return self._module.automatic_optimization and accumulates(self.trainer)

    @torch.no_grad()
    def average(self) -> None:
        """Every worker's ``.grad`` becomes the mean of all, weighted by samples.

        With a group, of those of this host.
        """
        self._has_mean = True
        if self._group is not None:
            self._group.settle()
        trained = {n: p for n, p in enumerate(self._parameters) if p.requires_grad}
        slots, worker = self._store.layout.slots, self._client.worker
        absent = self.replica.collect(tuple(trained))
        packed, finite = self.replica.packed, self.replica.finite
        trying = any(step.trying for step in self.steps)
        looks = not trying and self.replica.encoded is None
        if looks and not self.guard.accepts(tuple(trained), absent, packed, finite):
            self._gathered.clear()
            if self.buffers is not None:
                self.buffers.put_back(self._client.steps.version)
        if (encoded := self.replica.encoded) is None:
            for number in absent:
                self._store.gradient(self._store.row_of(worker), slots[number]).zero_()
        else:  # the server brings what is encoded to all the other places
            absent = tuple(n for n in range(len(slots)) if n not in trained or n in absent)
        # By hand each backward is averaged, so what was gathered before is the mean already.
        automatic, gathered = self._module.automatic_optimization, self._gathered
        weight = gathered.weight if automatic else gathered.running
        request = Average(weight, Row(absent, packed, encoded))
        among = self._client if self._group is None else self._group
        self._take_means(trained, among.average(request))
        self._meant.note(trained)

    def average_own(self, numbers: Iterable[int] | None = None) -> None:
        """By hand, before a step of these slots (``None``: all) or a clipping, and at the end of a
        ``training_step``: all workers average gradients that are no mean yet (of
        ``loss.backward()``, or set by the module).
        """
        # With the mean of a host's gradients a step's closure averages.
        if not self._by_hand or self._requirements.means_gradients:
            return
        if self._meant.lacks(range(len(self._parameters)) if numbers is None else numbers):
            self.average()

    def _take_means(self, trained: dict[int, torch.nn.Parameter], averaged: Averaged) -> None:
        """Copy the server's means to every ``.grad``."""
        sparse = {each.number: each for each in averaged.packed}
        gradients, sources = [], []
        for number in trained.keys() & set(averaged.absent):
            trained[number].grad = None  # of a step before, in a worker that sits this one out
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

    def output_of(self, closure: Callable[[], Any]) -> Any:
        """The output of a step's closure; ``None``, as where it has no loss: there is no gradient.

        A gradient scaler steps unless it is ``None``. Workers that step with a mean have it then,
        also where their closure has made no gradient.
        """
        self._has_mean = False
        output = closure()
        if (self.scales or self._requirements.means_gradients) and not self._has_mean:
            self.average()
        if not self.scales:
            return None if self._broken_off and self._gathered.weight <= 0 else output
        if all(parameter.grad is None for parameter in self._parameters):
            return None
        if output is not None:
            return output
        nothing = torch.zeros((), device=self._parameters[0].device)
        return self._scaler.scale(nothing)  # it makes its state when it first scales

    def _abstain(self) -> None:
        """This mini-batch has no gradient (``training_step`` returned ``None``).

        What earlier mini-batches have accumulated still counts.
        """
        self._gathered.leave_out()
        averages = self.averages and not self._requirements.means_gradients
        if averages and self._gathered.weight > 0 and not self.accumulates():
            self.average()  # no backward will do it

    def training_step(self, step: Callable[[], Any]) -> Any:
        """Run the user's; ``None``, as if it had returned that, where a fault is forgiven."""
        automatic = self._module.automatic_optimization
        try:
            if self._requirements.backs_up:
                self._client.queue.check_need()
            with self._foreign.user_code:
                output = step()
            self.average_own()  # what a later mini-batch will step
        except NotNeeded:
            output = None
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
        self.replica.adds(self.accumulates())
        try:
            return run()
        except Exception as error:
            if not isinstance(error, NotNeeded) and not self.guard.forgives(error):
                raise
        for parameter in self._parameters:
            parameter.grad = None
        self._gathered.clear()
        self._broken_off = self._scaler is not None
        return loss.detach()


# ---- gradients under manual optimization ---------------------------------------------------------


class Meant:
    """Which gradients are the mean of all workers: not those that the module has made since itself.

    ``loss.backward()`` adds to a gradient, which a hook sees; the module may set another one, which
    is another tensor; or write to one, in a mini-batch without a mean (else it clips that).

    Args:
        parameters: by slot number.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._known: dict[int, tuple[TensorWeakRef, int, int]] = {}  # with version and mini-batch
        self._added: set[int] = set()
        self._batch = 0
        self._hooks: dict[int, Any] = {}
        self._watch(n for n, p in enumerate(parameters) if p.requires_grad)

    def _watch(self, numbers: Iterable[int]) -> None:
        for n in numbers:
            if n not in self._hooks:
                parameter = self._parameters[n]
                adds = partial(self._add, n)
                self._hooks[n] = parameter.register_post_accumulate_grad_hook(adds)

    def _add(self, number: int, _: torch.Tensor) -> None:
        self._added.add(number)

    def begin_batch(self) -> None:
        """A mini-batch begins."""
        self._batch += 1

    def note(self, numbers: Iterable[int]) -> None:
        """The gradients of these are the mean now."""
        if not self._parameters:
            return
        for n in numbers:
            if (gradient := self._parameters[n].grad) is not None:
                self._known[n] = TensorWeakRef(gradient), gradient._version, self._batch
        self._added.difference_update(numbers)
        self._watch(numbers)

    def lacks(self, numbers: Iterable[int]) -> bool:
        """Whether one of these has a gradient that is not."""
        trained = ((n, self._parameters[n]) for n in numbers)
        return any(
            p.requires_grad and p.grad is not None and not self._is_mean(n, p.grad)
            for n, p in trained
        )

    def _is_mean(self, number: int, gradient: torch.Tensor) -> bool:
        if number in self._added or number not in self._known:
            return False
        known, version, batch = self._known[number]
        return known() is gradient and (batch == self._batch or version == gradient._version)

    def close(self) -> None:
        """Training is over."""
        for hook in self._hooks.values():
            hook.remove()


# ---- a module that steps its parameters itself, without an optimizer -----------------------------


class NoOptimizer(torch.optim.Optimizer):
    """Stands for the module, which steps its trainable parameters itself."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__([p for p in module.parameters() if p.requires_grad], {})

    def step(self, closure: Any = None) -> Any:
        """Nothing."""


def writes_itself(
    module: LightningModule, optimizers: Iterable[torch.optim.Optimizer], shared: bool
) -> bool:
    """Whether the module steps its parameters without an optimizer, which all ``shared``."""
    given = any(optimizer.param_groups for optimizer in optimizers)  # Lightning's stand-in has none
    if given or module.automatic_optimization:
        return False
    if not shared:
        name = type(module).__name__
        rank_zero_warn(
            f"{name} has no optimizer under this strategy: what it writes to its parameters is "
            "each worker's own, and worker 0's is kept; use strategy=hogwild to share them, or "
            "return an optimizer from configure_optimizers"
        )
    return shared
