"""What a worker does that has to end before its job is done."""

from __future__ import annotations

import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytorch_lightning as pl
from lightning_utilities.core.rank_zero import rank_zero_warn
from pytorch_lightning.trainer import call

from hybridtrain.client import Client, StopRequested
from hybridtrain.errors import UserError
from hybridtrain.lightning.succession import hand_over
from hybridtrain.worlds.channel import ChannelClosed

INTERRUPTED_CHECKPOINT = "interrupted.ckpt"
_PATIENCE_S = 5.0


def may_save(trainer: pl.Trainer, error: BaseException) -> bool:
    """Whether a worker that has failed may write the last checkpoint: the run ends with it.

    And Lightning has counted the steps that were made, and no others. Else one of those who stop
    writes it; but a mistake that all workers make leaves none of them.
    """
    strategy = cast(Any, trainer.strategy)
    client = strategy.client
    others = set(client.there) - client.away - {client.worker}
    if isinstance(error, ChannelClosed):  # the parent is gone, and with it the moments
        return False
    if not strategy.on_failure.ends_with(error, len(others)) or not _hears(client):
        return False
    with suppress(StopRequested, UserError):  # the step that was under way may be broken off
        client.check_stop()
    return trainer.global_step == client.version or not strategy.regime.lockstep


def _hears(client: Client) -> bool:
    """Whether what was offered has been answered; a worker that hangs could delay it for long."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while client.offered is not None and not client.has_mail() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return client.offered is None or client.has_mail()


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
        if strategy.provisional is not None:
            strategy.provisional.give_up()
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
