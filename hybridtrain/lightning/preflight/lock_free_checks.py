"""What cannot be done where workers write the shared parameters themselves: said at the start."""

from __future__ import annotations

from typing import Any

from pytorch_lightning.accelerators import CPUAccelerator
from pytorch_lightning.callbacks import StochasticWeightAveraging, WeightAveraging

from hybridtrain.errors import UserError
from hybridtrain.updates.staleness import Correction


def check_lock_free(trainer: Any, n_workers: int, correction: Correction | None) -> None:
    """Look at what was asked for beside it.

    Raises:
        UserError: naming the option, and what to do.
    """
    if not isinstance(trainer.accelerator, CPUAccelerator):
        name = type(trainer.accelerator).name()
        raise UserError(
            f"accelerator={name!r} was given, but workers without a lock write to parameters in "
            "host memory; use Trainer(accelerator='cpu'), or strategy=async"
        )
    if correction is not None:
        raise UserError(
            f"correction={correction} was given, but under hogwild no gradient is ever sent that "
            "could be corrected; leave it out, or use strategy=async"
        )
    for callback in trainer.callbacks:
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging) and n_workers > 1:
            raise UserError(
                f"the callback {type(callback).__name__} was given, which swaps parameters, but "
                f"these are shared by all {n_workers} workers, each of which would swap them; "
                "leave it out, or use strategy=async"
            )
