"""What a worker does that has to end before its job is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytorch_lightning as pl
from lightning_utilities.core.rank_zero import rank_zero_warn
from pytorch_lightning.trainer import call

from hybridtrain.client import StopRequested

INTERRUPTED_CHECKPOINT = "interrupted.ckpt"


def save_interrupted(trainer: pl.Trainer) -> None:
    """One checkpoint of the last whole update, where the others lie. Needs no other worker."""
    checkpoint = trainer.checkpoint_callback
    folder = getattr(checkpoint, "dirpath", None)
    if not trainer.is_global_zero or not folder or trainer.state.fn != "fit":
        return
    path, strategy = Path(folder) / INTERRUPTED_CHECKPOINT, cast(Any, trainer.strategy)
    try:
        strategy.before_checkpoint()  # others may have made updates that this one has not
        if trainer.global_step == 0:
            return
        trainer.save_checkpoint(path)
        for callback in trainer.checkpoint_callbacks:  # one is enough
            vars(callback)["_last_global_step_saved"] = trainer.global_step
        if str(path) not in strategy.keeping.unsaved.lost:  # or it has been said why
            print(f"stopped after step {trainer.global_step}, checkpoint: {path}", flush=True)
    except Exception as error:
        rank_zero_warn(f"no checkpoint could be written to {path}: {error}")


def say_goodbye(trainer: pl.Trainer, error: BaseException) -> None:
    """What Lightning does in the process that called it: tell callbacks and loggers."""
    try:
        call._interrupt(trainer, error)
        trainer._teardown()
    except (Exception, StopRequested) as second:  # the first error is the one to report
        rank_zero_warn(f"while ending after {type(error).__name__}: {second!r}")
