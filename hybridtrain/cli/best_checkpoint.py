"""Which checkpoint stands for a run, and which figures.

A run is told by one model: the one of the best checkpoint, by ``task.monitor``; without a monitor,
or where no checkpoint was written, as it was when training ended. Its test is of that model. What
was validated is so, too: the metrics of the validation that came last when that checkpoint was
written, which :class:`hybridtrain.cli.telemetry.monitor.RunMonitor` leaves in every checkpoint;
where there is none, those of the last validation. Metrics of training are those that were logged
last.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from hybridtrain.cli.telemetry.monitor import VALIDATED, RunMonitor


def best_checkpoint(trainer: pl.Trainer) -> str | None:
    """Its path, if a file is there: of callbacks that watch a metric, or else of any."""
    found = [x for x in trainer.checkpoint_callbacks if isinstance(x, ModelCheckpoint)]
    paths = [x.best_model_path for x in sorted(found, key=lambda x: x.monitor is None)]
    return next((path for path in paths if path and Path(path).is_file()), None)


def logged(trainer: pl.Trainer) -> dict[str, float]:
    """What module and callbacks have logged last, without learning rates."""
    found = trainer.callback_metrics.items()
    return {name: float(value) for name, value in found if not name.startswith("lr-")}


def metrics_of(trainer: pl.Trainer) -> dict[str, float]:
    """The figures of a training that has ended, see above."""
    best = best_checkpoint(trainer)
    if best is None:
        return logged(trainer)
    return logged(trainer) | _scores(trainer, best) | validated(best)


def has_validated(trainer: pl.Trainer) -> bool:
    """Whether a training that has ended was validated on the way.

    Lightning's forks leave the loops' counters behind, and what they have logged in checkpoints.
    """
    if trainer.fit_loop.epoch_loop.val_loop.batch_progress.total.ready:
        return True
    best = best_checkpoint(trainer)
    return best is not None and bool(validated(best))


def _scores(trainer: pl.Trainer, best: str) -> dict[str, float]:
    """What the callback that has chosen it knows."""
    return {
        each.monitor: float(each.best_model_score)
        for each in trainer.checkpoint_callbacks
        if isinstance(each, ModelCheckpoint) and each.best_model_path == best
        if each.monitor is not None and each.best_model_score is not None
    }


def validated(path: str) -> dict[str, float]:
    """The metrics of the validation that came last when a checkpoint of this run was written."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        found = content["callbacks"][RunMonitor.__qualname__][VALIDATED]
    # Of a version that did not tell, torn, or with a user's own objects.
    except (KeyError, TypeError, OSError, RuntimeError, UnpicklingError):
        return {}
    return _numbers(found)


def _numbers(found: Any) -> dict[str, float]:
    if not isinstance(found, Mapping):
        return {}
    return {str(k): float(v) for k, v in found.items() if isinstance(v, int | float)}
