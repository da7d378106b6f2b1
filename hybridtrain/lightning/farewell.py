"""What a worker does that has to end before its job is done."""

from __future__ import annotations

import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytorch_lightning as pl
from lightning_utilities.core.rank_zero import rank_zero_warn
from pytorch_lightning.trainer import call

from hybridtrain.client import StopRequested
from hybridtrain.errors import UserError
from hybridtrain.lightning.succession import hand_over
from hybridtrain.worlds.channel import ChannelClosed

INTERRUPTED_CHECKPOINT = "interrupted.ckpt"


def may_save(trainer: pl.Trainer, error: BaseException) -> bool:
    """Whether a worker that has failed may write the last checkpoint: the run ends with it.

    And Lightning has counted the steps that were made, and no others. Else one of those who stop
    writes it; but a mistake that all workers make leaves none of them.
    """
    strategy = cast(Any, trainer.strategy)
    if strategy.on_failure.choice != "stop" and not isinstance(error, UserError):
        return False
    if isinstance(error, ChannelClosed):
        return False  # the parent is gone, and with it the moments
    with suppress(StopRequested, UserError):  # the step that was under way is broken off
        strategy.client.settle()
    counted = trainer.global_step == strategy.client.version
    return counted or not strategy.regime.lockstep


def save_interrupted(trainer: pl.Trainer) -> bool:
    """One checkpoint of the last whole update, where the others lie; whether one was written.

    Needs no other worker.
    """
    checkpoint = trainer.checkpoint_callback
    folder = getattr(checkpoint, "dirpath", None)
    if not trainer.is_global_zero or not folder or trainer.state.fn != "fit":
        return False
    path, strategy = Path(folder) / INTERRUPTED_CHECKPOINT, cast(Any, trainer.strategy)
    try:
        strategy.before_checkpoint()  # others may have made updates that this one has not
        if trainer.global_step == 0:
            return False
        if strategy.client.worker != 0:
            hand_over(trainer)
        trainer.save_checkpoint(path)
        for callback in trainer.checkpoint_callbacks:  # one is enough
            vars(callback)["_last_global_step_saved"] = trainer.global_step
    except Exception as error:
        # Not Lightning's, which only worker 0 gives.
        warnings.warn(f"no checkpoint could be written to {path}: {error}", stacklevel=2)
        return False
    if written := str(path) not in strategy.keeping.unsaved.lost:  # else it has been said why
        print(f"stopped after step {trainer.global_step}, checkpoint: {path}", flush=True)
    return written


def say_goodbye(trainer: pl.Trainer, error: BaseException) -> None:
    """What Lightning does in the process that called it: tell callbacks and loggers."""
    try:
        call._interrupt(trainer, error)
        trainer._teardown()
    except (Exception, StopRequested) as second:  # the first error is the one to report
        rank_zero_warn(f"while ending after {type(error).__name__}: {second!r}")
