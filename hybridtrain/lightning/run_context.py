"""Find a trainer's strategy, worker and checkpoints, for code that has the trainer alone.

All else is handed on when a part is made: by the launcher, and by the strategy, which makes the
parts of a worker.
"""

from __future__ import annotations

from typing import Any, cast

from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.strategies import Strategy

from hybridtrain.lightning.worker_context import WorkerContext


def strategy_of(trainer: Any) -> Strategy:
    """The trainer's strategy, of any kind."""
    return cast(Strategy, trainer.strategy)


def worker_of(trainer: Any) -> WorkerContext | None:
    """The worker that the trainer is in; ``None``: no worker of ours.

    For methods of Lightning's classes, and callbacks that users make.
    """
    found = getattr(trainer.strategy, "worker", None)
    return found if isinstance(found, WorkerContext) else None


def checkpoints_of(trainer: Any) -> list[ModelCheckpoint]:
    """The trainer's ``ModelCheckpoint`` callbacks."""
    return [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
