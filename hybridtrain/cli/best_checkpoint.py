"""The checkpoint and metrics that stand for a run.

All metrics are of one model, that of the best checkpoint by ``task.monitor``; without a monitor or
a checkpoint, the model at the end of training. Validation metrics are those of the last validation
before that checkpoint was written, which :class:`hybridtrain.cli.telemetry.monitor.RunMonitor`
stores in every checkpoint; if it is missing there, those of the last validation. Training metrics
are the last that were logged.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError

import pytorch_lightning as pl
import torch

from hybridtrain.cli.telemetry.monitor import VALIDATED, RunMonitor
from hybridtrain.lightning.run_context import checkpoints_of


def best_checkpoint(trainer: pl.Trainer) -> str | None:
    """Path of the best checkpoint: of a callback that monitors a metric, or else of any."""
    found = sorted(checkpoints_of(trainer), key=lambda x: x.monitor is None)
    paths = [x.best_model_path for x in found]
    return next((path for path in paths if path and Path(path).is_file()), None)


def logged(trainer: pl.Trainer) -> dict[str, float]:
    """The last values logged by module and callbacks, without learning rates."""
    found = trainer.callback_metrics.items()
    return {name: float(value) for name, value in found if not name.startswith("lr-")}


def metrics_of(trainer: pl.Trainer) -> dict[str, float]:
    """The metrics of a training that has ended (see the module's docstring)."""
    best = best_checkpoint(trainer)
    if best is None:
        return logged(trainer)
    return logged(trainer) | _scores(trainer, best) | validated(best)


def has_validated(trainer: pl.Trainer) -> bool:
    """Whether a training that has ended ran a validation.

    Ranks forked by Lightning do not return the loops' counters; their checkpoints have the metrics.
    """
    if trainer.fit_loop.epoch_loop.val_loop.batch_progress.total.ready:
        return True
    best = best_checkpoint(trainer)
    return best is not None and bool(validated(best))


def _scores(trainer: pl.Trainer, best: str) -> dict[str, float]:
    """The monitored metric of the callback that chose this checkpoint."""
    return {
        each.monitor: float(each.best_model_score)
        for each in checkpoints_of(trainer)
        if each.best_model_path == best
        if each.monitor is not None and each.best_model_score is not None
    }


def validated(path: str) -> dict[str, float]:
    """The metrics of the last validation before a checkpoint of this run was written."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        found = content["callbacks"][RunMonitor.__qualname__][VALIDATED]
    # Of an older version, damaged, or with a user's own objects.
    except (KeyError, TypeError, OSError, RuntimeError, UnpicklingError):
        return {}
    if not isinstance(found, Mapping):
        return {}
    return {str(k): float(v) for k, v in found.items() if isinstance(v, int | float)}
