"""What cannot work is said before any process is started."""

from __future__ import annotations

from typing import Any

from lightning_fabric.strategies.launchers.multiprocessing import _check_missing_main_guard

from hybridtrain.errors import UserError


def check_trainer(trainer: Any, lockstep: bool, start_method: str) -> None:
    """Look at the trainer's options with the policy and the start method in mind.

    Raises:
        UserError: naming the option, what is allowed, and what to do.
        RuntimeError: Lightning's own, for a script that spawns without a ``__main__`` guard.
    """
    if start_method != "fork":
        _check_missing_main_guard()
    if trainer.state.fn != "fit" or lockstep:
        return
    interval = trainer.val_check_interval
    if interval not in (None, 1.0) or isinstance(interval, int):
        raise UserError(
            f"val_check_interval={interval} was given, but workers that run freely meet only at "
            "the end of an epoch; leave it at 1.0 (and use check_val_every_n_epoch), or use "
            "strategy=hybrid"
        )
    limit = trainer.limit_train_batches
    if isinstance(limit, float) and limit != 1.0:
        raise UserError(
            f"limit_train_batches={limit} was given, but workers that draw from one queue have no "
            "share to take a part of; give a whole number of mini-batches per worker, or use "
            "strategy=hybrid"
        )
