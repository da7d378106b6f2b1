"""The optimizers and schedulers of a training, in the calling process.

Those that the caller has made and handed to the module, a layer or a callback take their trained
states over; so do those that ``configure_optimizers`` makes or finds, which is called for them when
training has ended. Training may have added parameter groups (``BaseFinetuning``), so worker 0 sends
beside each state the name of the class and, of an optimizer, the names of its parameters.
Optimizers of classes that ``configure_optimizers`` does not make do not come home.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from pytorch_lightning.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hybridtrain.engine.updates.serialize import subclasses
from hybridtrain.lightning.hooks.trainer_hooks import configured_optimizers
from hybridtrain.lightning.results.returned_training import made_or_none
from hybridtrain.lightning.run_context import strategy_of
from hybridtrain.lightning.states.held_objects import HeldObjects, load_in_place
from hybridtrain.lightning.states.plain_data import Held, class_name


@dataclass(frozen=True)
class Form:
    """An optimizer without its state: its class, and its parameters' names by group."""

    kind: str
    names: list[list[str]]
    held: Held | None = field(default=None, compare=False)

    @classmethod
    def of(
        cls, optimizer: Optimizer, module: torch.nn.Module, held: HeldObjects | None = None
    ) -> Form:
        """The form of this optimizer."""
        name_of = {id(p): name for name, p in module.named_parameters()}
        names = [[name_of[id(p)] for p in g["params"]] for g in optimizer.param_groups]
        return cls(class_name(optimizer), names, None if held is None else held.refer(optimizer))


@dataclass(frozen=True)
class ScheduleForm:
    """A scheduler without its state: its class, the number of its optimizer, its configuration."""

    kind: str
    number: int | None  # ``None``: its optimizer is not in the trainer
    config: dict[str, Any]
    held: Held | None

    @classmethod
    def of(cls, config: Any, optimizers: Sequence[Optimizer], held: HeldObjects) -> ScheduleForm:
        """The form of the configuration's scheduler."""
        places = (n for n, each in enumerate(optimizers) if each is config.scheduler.optimizer)
        about = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "scheduler"}
        about["frequency"] = int(config.frequency)  # or one that counts in this worker
        scheduler = config.scheduler
        return cls(class_name(scheduler), next(places, None), about, held.refer(scheduler))


@dataclass(frozen=True)
class TrainedOptimizers:
    """Worker 0's optimizers and schedulers.

    ``saved``: their states, as in a checkpoint.
    """

    saved: dict[str, Any]
    optimizers: list[Form]
    schedules: list[ScheduleForm]

    @classmethod
    def of(cls, trainer: Any, held: HeldObjects) -> TrainedOptimizers:
        """In worker 0, whose states are of one version."""
        strategy, module = strategy_of(trainer), trainer.lightning_module
        optimizers, configs = trainer.optimizers, trainer.lr_scheduler_configs
        saved = {
            "optimizer_states": [strategy.optimizer_state(each) for each in optimizers],
            "lr_schedulers": [config.scheduler.state_dict() for config in configs],
        }
        forms = [Form.of(each, module, held) for each in optimizers]
        schedules = [ScheduleForm.of(config, optimizers, held) for config in configs]
        return cls(saved, forms, schedules)

    def come_home(
        self, module: Any, held: HeldObjects
    ) -> tuple[list[Any], list[LRSchedulerConfig]] | None:
        """Optimizers and schedulers with their trained states, those of the caller first.

        ``None``: ``configure_optimizers`` cannot be called here, or a class is not known.
        """
        mine = [_held(form, held) for form in self.optimizers]
        for optimizer, form, state in self._with_state(mine):
            if optimizer is not None:
                _restore(optimizer, form, state, module)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Lightning's, which the workers have said
            try:
                return self._make(module, mine, [_held(form, held) for form in self.schedules])
            except Exception:
                return None

    def made_here(self, module: Any) -> tuple[list[Any], list[Any]]:
        """The same where that was not possible: a warning says why; none if it fails again."""
        nothing: list[Any] = [None] * len(self.optimizers)
        schedules: list[Any] = [None] * len(self.schedules)
        make = lambda: self._make(module, nothing, schedules)  # noqa: E731
        return made_or_none(make, "the optimizers") or ([], [])

    def into(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint of the calling process, with what its optimizers do not know of themselves.

        Without optimizers it has their states when training ended.
        """
        mine, then = checkpoint["optimizer_states"], self.saved["optimizer_states"]
        if len(mine) != len(then):
            return {**checkpoint, **self.saved}
        both = [{**saved, **now} for saved, now in zip(then, mine, strict=True)]
        return {**checkpoint, "optimizer_states": both}

    def _with_state(self, optimizers: Sequence[Any]) -> Iterator[tuple[Any, Form, dict[str, Any]]]:
        return zip(optimizers, self.optimizers, self.saved["optimizer_states"], strict=True)

    def _make(
        self, module: Any, mine: Sequence[Any], my_schedules: Sequence[Any]
    ) -> tuple[list[Any], list[LRSchedulerConfig]]:
        """``mine``: the caller's own, with their states; ``None``: another."""
        known = all(each is not None for each in (*mine, *my_schedules))
        found, configs = ([], []) if known else configured_optimizers(module)
        others = self._in_form([each for each in found if each not in mine], mine, module)
        optimizers = [next(others) if each is None else each for each in mine]
        schedulers = [config.scheduler for config in configs]
        states = zip(self.schedules, self.saved["lr_schedulers"], my_schedules, strict=True)
        schedules = []
        for place, (form, state, scheduler) in enumerate(states):
            if scheduler is None:
                scheduler = _scheduler(form.kind, schedulers[place : place + 1])
            scheduler.load_state_dict(state)
            if form.number is not None:
                _bind(scheduler, optimizers[form.number])
            schedules.append(LRSchedulerConfig(scheduler, **form.config))
        return optimizers, schedules

    def _in_form(
        self, configured: Sequence[Optimizer], mine: Sequence[Any], module: torch.nn.Module
    ) -> Iterator[Optimizer]:
        """For each form without an optimizer of ``mine``: a configured one."""
        waiting = [(Form.of(each, module), each) for each in configured]
        for here, form, state in self._with_state(mine):
            if here is not None:
                continue
            alike = [pair for pair in waiting if pair[0] == form]
            alike += [pair for pair in waiting if pair[0].kind == form.kind]
            if not alike:
                raise LookupError(
                    f"configure_optimizers makes no {form.kind}, which training has put into the "
                    "trainer; make it there, or in __init__"
                )
            waiting.remove(alike[0])
            _restore(alike[0][1], form, state, module)
            yield alike[0][1]


def _held(form: Form | ScheduleForm, held: HeldObjects) -> Any:
    """The caller's own object; ``None``: it has none of this class."""
    if form.held is None:
        return None
    try:
        found = held.at(form.held.way)
    except LookupError:
        return None
    return found if class_name(found) == form.kind else None


def _restore(
    optimizer: Optimizer, form: Form, state: dict[str, Any], module: torch.nn.Module
) -> None:
    """Let the optimizer have these parameters in these groups, and its trained state."""
    parameters, groups = dict(module.named_parameters()), optimizer.param_groups
    for number, names in enumerate(form.names):
        if number == len(groups):
            groups.append({})
        groups[number]["params"] = [parameters[name] for name in names]
    del groups[len(form.names) :]
    if state:
        load_in_place(optimizer, state)


def _scheduler(kind: str, configured: Sequence[Any]) -> Any:
    """The configured scheduler if it is of this class, or a new one, without state.

    ``StochasticWeightAveraging`` puts its own into the trainer.
    """
    for each in configured:
        if class_name(each) == kind:
            return each
    known: list[Any] = [each for each in subclasses(LRScheduler) if class_name(each) == kind]
    if known:  # the latest of its name
        return known[-1].__new__(known[-1])
    raise LookupError(
        f"{kind} is a class that only workers know; define it at a module's top level"
    )


def _bind(scheduler: Any, optimizer: Optimizer) -> None:
    """Let the scheduler, and those inside it, move the rates of this optimizer."""
    scheduler.optimizer = optimizer
    for each in getattr(scheduler, "_schedulers", ()):
        _bind(each, optimizer)
