"""A worker that is slower than the others, on purpose: to see what a strategy makes of it."""

from __future__ import annotations

import time
from typing import Any

import pytorch_lightning as pl
from torch import Tensor

from hybridtrain.errors import UserError

STEP_PER_FORWARD = 3.0  # backward takes about twice as long as forward


class Straggler(pl.Callback):
    """Lets the last worker take ``times`` as long for each mini-batch, by sleeping.

    The sleep is in proportion to the forward pass just made, so it scales with the work. It takes
    no core from the other workers, which a slower device of its own would not do either. What
    belongs to the loop around the mini-batch (loading, logging) keeps its time.

    Args:
        times: at least 1; 1 changes nothing.

    Raises:
        UserError: if ``times`` is below 1.
    """

    def __init__(self, times: float = 3.0) -> None:
        if times < 1:
            raise UserError(f"times={times} was given; a straggler takes at least 1 times as long")
        self.times = times
        self._began: float | None = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """The forward pass begins."""
        self._began = time.perf_counter()

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        """The forward pass has ended: sleep for what a slower device would take longer."""
        last = trainer.global_rank == trainer.world_size - 1
        if last and self.times > 1 and self._began is not None:
            forward_s = time.perf_counter() - self._began
            time.sleep((self.times - 1) * STEP_PER_FORWARD * forward_s)
        self._began = None
