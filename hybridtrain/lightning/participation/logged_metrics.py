"""What a worker takes over from those who had a part in a step, or in an epoch, that it had not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils._pytree import tree_map_only

from hybridtrain.lightning.async_training.update_count import (
    Schedules,
    schedules_of,
    take_schedules,
)
from hybridtrain.lightning.hooks.result_hooks import (
    begin_anew,
    described,
    entry_of,
    show_metrics,
    shown_metrics,
    training_results,
)
from hybridtrain.lightning.results.callback_state import give_state, standing_of
from hybridtrain.lightning.run_context import context_of, strategy_of


@dataclass(frozen=True)
class Entry:
    """What ``self.log`` was told of one metric: all but its value."""

    about: dict[str, Any]
    sync: dict[str, Any]
    is_tensor: bool


Entries = dict[str, Entry]


def entries(trainer: Any) -> Entries:
    """What training has logged in this epoch."""
    results = training_results(trainer).items()
    return {k: Entry(*described(each), each.is_tensor) for k, each in results if not each.has_reset}


def take_entries(trainer: Any, known: Entries) -> None:
    """The same, with nothing in it yet: what is reduced with the others' changes nothing."""
    results = training_results(trainer)
    for key, entry in known.items():
        if key not in results:
            results[key] = _made(trainer, entry)
        begin_anew(results[key])


def _made(trainer: Any, entry: Entry) -> Any:
    made = entry_of(entry.about, entry.sync, entry.is_tensor, strategy_of(trainer).reduce)
    if entry.is_tensor:
        return made.to(context_of(trainer).root_device)
    made.value = trainer.lightning_module.get_submodule(made.meta.metric_attribute)
    return made


def metrics_of(trainer: Any, collects: bool = False) -> dict[str, dict[str, Any]]:
    """What callbacks, loggers and the progress bar see now, in host memory.

    ``collects``: with what has been logged, but not reduced yet.
    """
    if collects:
        _ = trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics
    shown = shown_metrics(trainer)
    return tree_map_only(torch.Tensor, lambda value: value.detach().cpu(), shown)


@dataclass(frozen=True)
class StepOutcome:
    """What a mini-batch, or an evaluation, has brought about in a worker that took part in it.

    Metrics and decisions: the wish to stop, and what the callbacks that decide know.
    ``schedules``: those that user code steps by hand, which others have not run.
    """

    metrics: dict[str, dict[str, Any]]
    should_stop: bool
    standings: list[dict[str, Any]]
    schedules: Schedules | None

    @classmethod
    def of(
        cls, trainer: Any, callbacks: Sequence[pl.Callback], collects: bool = False
    ) -> StepOutcome:
        """Of this worker; ``collects``: see :func:`metrics_of`."""
        metrics = metrics_of(trainer, collects)
        standings = [standing_of(each, trainer.lightning_module) for each in callbacks]
        by_hand = not trainer.lightning_module.automatic_optimization
        schedules = schedules_of(trainer) if by_hand and trainer.optimizers else None
        return cls(metrics, bool(trainer.should_stop), standings, schedules)

    def give(self, trainer: Any, callbacks: Sequence[pl.Callback]) -> None:
        """To this worker."""
        show_metrics(trainer, self.metrics)
        trainer.should_stop = self.should_stop
        for callback, state in zip(callbacks, self.standings, strict=True):
            give_state(callback, trainer.lightning_module, state)
        if self.schedules is not None:
            take_schedules(trainer, *self.schedules)


def steps_of(loop: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """How many steps Lightning has counted, of both kinds of optimization."""
    automatic, manual = loop.automatic_optimization, loop.manual_optimization
    return automatic.optim_progress.state_dict(), manual.optim_step_progress.state_dict()


def take_steps(loop: Any, known: tuple[dict[str, Any], dict[str, Any]] | None) -> None:
    """Count as many; ``None``: nobody has made any."""
    if known is not None:
        loop.automatic_optimization.optim_progress.load_state_dict(known[0])
        loop.manual_optimization.optim_step_progress.load_state_dict(known[1])
