"""The optimizers and schedulers of a training, in the calling process.

``configure_optimizers`` makes them there, on first use. Training may have added parameter groups
(``BaseFinetuning``) or put other optimizers and schedulers into the trainer. So worker 0 sends
beside each state the name of the class and, of an optimizer, the names of its parameters. What the
hook has not made in this form is made anew, from classes that the calling process has loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from inspect import signature
from typing import Any

import torch
from pytorch_lightning.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hybridtrain.lightning.hooks.trainer_hooks import configured_optimizers
from hybridtrain.lightning.results.callback_state import class_name
from hybridtrain.lightning.results.returned_training import made_or_none
from hybridtrain.lightning.run_context import context_of
from hybridtrain.updates.serialize import subclasses


@dataclass(frozen=True)
class Form:
    """An optimizer without its state: its class, and its parameters' names by group."""

    kind: str
    names: list[list[str]]

    @classmethod
    def of(cls, optimizer: Optimizer, module: torch.nn.Module) -> Form:
        """The form of this optimizer."""
        name_of = {id(p): name for name, p in module.named_parameters()}
        groups = optimizer.param_groups
        return cls(class_name(optimizer), [[name_of[id(p)] for p in g["params"]] for g in groups])


@dataclass(frozen=True)
class ScheduleForm:
    """A scheduler without its state: its class, the number of its optimizer, its configuration."""

    kind: str
    number: int | None  # ``None``: its optimizer is not in the trainer
    config: dict[str, Any]

    @classmethod
    def of(cls, config: Any, optimizers: Sequence[Optimizer]) -> ScheduleForm:
        """The form of the configuration's scheduler."""
        places = (n for n, each in enumerate(optimizers) if each is config.scheduler.optimizer)
        about = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "scheduler"}
        about["frequency"] = int(config.frequency)  # or one that counts in this worker
        return cls(class_name(config.scheduler), next(places, None), about)


@dataclass(frozen=True)
class Trained:
    """Worker 0's optimizers and schedulers.

    ``saved``: their states, as in a checkpoint.
    """

    saved: dict[str, Any]
    optimizers: list[Form]
    schedules: list[ScheduleForm]

    @classmethod
    def of(cls, trainer: Any) -> Trained:
        """In worker 0."""
        context, module = context_of(trainer), trainer.lightning_module
        context.before_checkpoint()
        optimizers, configs = trainer.optimizers, trainer.lr_scheduler_configs
        saved = {
            "optimizer_states": [context.optimizer_state(each) for each in optimizers],
            "lr_schedulers": [config.scheduler.state_dict() for config in configs],
        }
        forms = [Form.of(each, module) for each in optimizers]
        return cls(saved, forms, [ScheduleForm.of(config, optimizers) for config in configs])

    def made_here(self, module: Any) -> tuple[list[Any], list[Any]]:
        """Optimizers and schedulers with their trained states; none if making them fails."""
        made = made_or_none(lambda: self._make(module), "the optimizers")
        return ([], []) if made is None else made

    def _make(self, module: Any) -> tuple[list[Any], list[Any]]:
        found, configs = configured_optimizers(module)
        optimizers = list(self._in_form(found, module))
        for optimizer, state in zip(optimizers, self.saved["optimizer_states"], strict=True):
            if state:
                optimizer.load_state_dict(state)
        schedulers = [config.scheduler for config in configs]
        states = zip(self.schedules, self.saved["lr_schedulers"], strict=True)
        schedules = []
        for place, (form, state) in enumerate(states):
            scheduler = _scheduler(form.kind, schedulers[place : place + 1])
            scheduler.load_state_dict(state)
            if form.number is not None:
                _bind(scheduler, optimizers[form.number])
            schedules.append(LRSchedulerConfig(scheduler, **form.config))
        return optimizers, schedules

    def _in_form(
        self, configured: Sequence[Optimizer], module: torch.nn.Module
    ) -> Iterator[Optimizer]:
        """An optimizer of each form: a configured one, or a new one."""
        parameters = dict(module.named_parameters())
        waiting = [(Form.of(each, module), each) for each in configured]
        for form, state in zip(self.optimizers, self.saved["optimizer_states"], strict=True):
            same = next((pair for pair in waiting if pair[0] == form), None)
            if same is not None:
                waiting.remove(same)
                yield same[1]
                continue
            kind = _loaded(form.kind, Optimizer)
            groups = [{"params": [parameters[name] for name in names]} for names in form.names]
            known = state["param_groups"][0]
            needed = {n for n, p in signature(kind).parameters.items() if p.default is p.empty}
            yield kind(groups, **{name: known[name] for name in needed & known.keys() - {"params"}})


def _scheduler(kind: str, configured: Sequence[Any]) -> Any:
    """The configured scheduler if it is of this class, or a new one, without state."""
    for each in configured:
        if class_name(each) == kind:
            return each
    chosen = _loaded(kind, LRScheduler)
    return chosen.__new__(chosen)


def _loaded(kind: str, base: type) -> Any:
    """The class of this name that this process has loaded, the latest if there are several."""
    for each in reversed(subclasses(base)):
        if class_name(each) == kind:
            return each
    raise LookupError(
        f"{kind} is a class that only workers know; define it at a module's top level"
    )


def _bind(scheduler: Any, optimizer: Optimizer) -> None:
    """Let the scheduler, and those inside it, move the rates of this optimizer."""
    scheduler.optimizer = optimizer
    for each in getattr(scheduler, "_schedulers", ()):
        _bind(each, optimizer)
