"""What a worker takes over from those who had a part in a step, or in an epoch, that it had not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultMetric,
    _Sync,
)
from torch.utils._pytree import tree_map_only

from hybridtrain.lightning.results.callback_state import give_state, standing_of

_METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_SYNC = ("_should", "rank_zero_only", "_op")


@dataclass(frozen=True)
class Entry:
    """What ``self.log`` was told of one metric: all but its value."""

    about: dict[str, Any]
    sync: dict[str, Any]
    is_tensor: bool


Entries = dict[str, Entry]


def entries(trainer: Any) -> Entries:
    """What training has logged in this epoch."""
    results = trainer.fit_loop.epoch_loop._results
    return {key: _entry(each) for key, each in results.items() if not each.has_reset}


def _entry(logged: _ResultMetric) -> Entry:
    meta = logged.meta
    about = {each.name: getattr(meta, each.name) for each in fields(meta) if each.name != "_sync"}
    return Entry(about, {name: getattr(meta.sync, name) for name in _SYNC}, logged.is_tensor)


def take_entries(trainer: Any, known: Entries) -> None:
    """The same, with nothing in it yet: what is reduced with the others' changes nothing."""
    results = trainer.fit_loop.epoch_loop._results
    for key, entry in known.items():
        if key not in results:
            results[key] = _made(trainer, entry)
        results[key].has_reset = False
        results[key]._computed = None  # perhaps in an earlier epoch
        results[key]._update_count = 1  # or it warns that there was no update


def _made(trainer: Any, entry: Entry) -> _ResultMetric:
    meta = _Metadata(**entry.about)
    meta.sync = _Sync(fn=trainer.strategy.reduce, **entry.sync)
    made = _ResultMetric(meta, entry.is_tensor)
    if entry.is_tensor:
        return made.to(trainer.strategy.root_device)
    made.value = trainer.lightning_module.get_submodule(meta.metric_attribute)
    return made


def metrics_of(trainer: Any, collects: bool = False) -> dict[str, dict[str, Any]]:
    """What callbacks, loggers and the progress bar see now, in host memory.

    ``collects``: with what has been logged, but not reduced yet.
    """
    if collects:
        _ = trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics
    connector = trainer._logger_connector
    metrics = {name: dict(getattr(connector, name)) for name in _METRICS}
    return tree_map_only(torch.Tensor, lambda value: value.detach().cpu(), metrics)


def take_metrics(trainer: Any, metrics: dict[str, dict[str, Any]]) -> None:
    """Let them see that of another worker, too."""
    for name, values in metrics.items():
        getattr(trainer._logger_connector, name).update(values)


@dataclass(frozen=True)
class StepOutcome:
    """What a mini-batch, or an evaluation, has brought about in a worker that took part in it.

    Metrics and decisions: the wish to stop, and what the callbacks that decide know.
    """

    metrics: dict[str, dict[str, Any]]
    should_stop: bool
    standings: list[dict[str, Any]]

    @classmethod
    def of(
        cls, trainer: Any, callbacks: Sequence[pl.Callback], collects: bool = False
    ) -> StepOutcome:
        """Of this worker; ``collects``: see :func:`metrics_of`."""
        metrics = metrics_of(trainer, collects)
        standings = [standing_of(each, trainer.lightning_module) for each in callbacks]
        return cls(metrics, bool(trainer.should_stop), standings)

    def give(self, trainer: Any, callbacks: Sequence[pl.Callback]) -> None:
        """To this worker."""
        take_metrics(trainer, self.metrics)
        trainer.should_stop = self.should_stop
        for callback, state in zip(callbacks, self.standings, strict=True):
            give_state(callback, trainer.lightning_module, state)


def checkpoints_of(trainer: Any) -> list[ModelCheckpoint]:
    """Those that meet the others to decide."""
    return [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]


def steps_of(loop: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """How many steps Lightning has counted, of both kinds of optimization."""
    automatic, manual = loop.automatic_optimization, loop.manual_optimization
    return automatic.optim_progress.state_dict(), manual.optim_step_progress.state_dict()


def take_steps(loop: Any, known: tuple[dict[str, Any], dict[str, Any]] | None) -> None:
    """Count as many; ``None``: nobody has made any."""
    if known is not None:
        loop.automatic_optimization.optim_progress.load_state_dict(known[0])
        loop.manual_optimization.optim_step_progress.load_state_dict(known[1])
