"""Metrics and decisions that a worker without data takes over from workers with data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.warnings import PossibleUserWarning
from lightning_utilities.core.rank_zero import WarningCache
from pytorch_lightning.callbacks import Timer
from torch.utils._pytree import tree_map_only

from hybridtrain.lightning.hooks.loop_hooks import (
    begin_anew,
    current_results,
    described,
    entry_of,
    show_metrics,
    shown_metrics,
    training_results,
)
from hybridtrain.lightning.run_context import strategy_of
from hybridtrain.lightning.states.callback_state import give_state, standing_of
from hybridtrain.lightning.update_count import (
    Schedules,
    schedules_of,
    take_schedules,
)

_warned = WarningCache()

# Of each metric: the options of ``self.log``, those of its reduction, whether it is a tensor.
Entries = dict[str, tuple[dict[str, Any], dict[str, Any], bool]]


def entries(trainer: Any) -> Entries:
    """The metrics that training has logged in this epoch."""
    results = training_results(trainer).items()
    return {k: (*described(each), each.is_tensor) for k, each in results if not each.has_reset}


def take_entries(trainer: Any, known: Entries) -> None:
    """Add the same entries with neutral values, which do not change the reduction."""
    results = training_results(trainer)
    for key, entry in known.items():
        if key not in results:
            results[key] = made_entry(trainer, *entry)
        begin_anew(results[key])


def made_entry(trainer: Any, about: dict[str, Any], sync: dict[str, Any], is_tensor: bool) -> Any:
    """An entry as another worker has it, with a neutral value."""
    strategy = strategy_of(trainer)
    made = entry_of(about, sync, is_tensor, strategy.reduce)
    if is_tensor:
        return made.to(strategy.root_device)
    made.value = trainer.lightning_module.get_submodule(made.meta.metric_attribute)
    return made


def metrics_of(trainer: Any, collects: bool = False) -> dict[str, dict[str, Any]]:
    """Metrics of callbacks, loggers and the progress bar, in host memory.

    ``collects``: reduce what has been logged first.
    """
    if collects:
        _ = trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics
    shown = shown_metrics(trainer)
    return tree_map_only(torch.Tensor, lambda value: value.detach().cpu(), shown)


def warn_of_own_means(trainer: Any) -> None:
    """Warn of epoch means that are this worker's alone, in Lightning's words.

    Lightning does so only where ``torch.distributed`` is initialised.
    """
    for each in current_results(trainer).values():
        own = not (each.meta.sync.should or each.meta.sync.rank_zero_only)
        if own and each.is_tensor and each.meta.on_epoch:
            _warned.warn(
                f"It is recommended to use `self.log({each.meta.name!r}, ..., sync_dist=True)` "
                "when logging on epoch level in distributed setting to accumulate the metric "
                "across devices.",
                category=PossibleUserWarning,
            )


@dataclass(frozen=True)
class StepOutcome:
    """The effects of a mini-batch or an evaluation in a worker that took part.

    Metrics, the request to stop, states of callbacks (``standings``), and ``schedules`` that user
    code steps by hand.
    """

    metrics: dict[str, dict[str, Any]]
    should_stop: bool
    standings: list[dict[str, Any]]
    schedules: Schedules | None

    @classmethod
    def of(
        cls, trainer: Any, callbacks: Sequence[pl.Callback], collects: bool = False
    ) -> StepOutcome:
        """In the worker that took part; ``collects``: see :func:`metrics_of`."""
        metrics = metrics_of(trainer, collects)
        # A worker's clock goes on; with another's time, too, it would count its own twice.
        standings = [
            {} if isinstance(each, Timer) else standing_of(each, trainer.lightning_module)
            for each in callbacks
        ]
        by_hand = not trainer.lightning_module.automatic_optimization
        schedules = schedules_of(trainer) if by_hand and trainer.optimizers else None
        return cls(metrics, bool(trainer.should_stop), standings, schedules)

    def give(self, trainer: Any, callbacks: Sequence[pl.Callback]) -> None:
        """In a worker that did not: take them over."""
        show_metrics(trainer, self.metrics)
        trainer.should_stop = self.should_stop
        for callback, state in zip(callbacks, self.standings, strict=True):
            give_state(callback, trainer.lightning_module, state)
        if self.schedules is not None:
            take_schedules(trainer, *self.schedules)


def steps_of(loop: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Lightning's counters of steps, of both kinds of optimization."""
    automatic, manual = loop.automatic_optimization, loop.manual_optimization
    return automatic.optim_progress.state_dict(), manual.optim_step_progress.state_dict()


def n_steps(known: tuple[dict[str, Any], dict[str, Any]]) -> int:
    """How many steps these counters have."""
    automatic, manual = known
    return int(automatic["optimizer"]["step"]["total"]["completed"] + manual["total"]["completed"])


def take_steps(loop: Any, known: tuple[dict[str, Any], dict[str, Any]] | None) -> None:
    """Restore them; ``None``: no worker has made a step."""
    if known is not None:
        loop.automatic_optimization.optim_progress.load_state_dict(known[0])
        loop.manual_optimization.optim_step_progress.load_state_dict(known[1])
