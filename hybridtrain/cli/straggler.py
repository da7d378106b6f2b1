"""A worker that is slower than the others, on purpose: to see what a strategy makes of it."""

from __future__ import annotations

import time
from typing import Any

import pytorch_lightning as pl
import torch

from hybridtrain.errors import UserError


class Straggler(pl.Callback):
    """Lets the last worker take ``times`` as long for each mini-batch, by sleeping.

    The sleep is in proportion to the processor time that the worker has spent since the mini-batch
    before, so it scales with the work and leaves out what was waiting. It takes no core from the
    other workers, which a slower device of its own would not do either. Where workers share cores,
    all take longer than their processor time, and the last one is that much less than ``times``
    slower. Meant for workers on the CPU.

    Args:
        times: at least 1; 1 changes nothing.

    Raises:
        UserError: if ``times`` is below 1.
    """

    def __init__(self, times: float = 3.0) -> None:
        if times < 1:
            raise UserError(f"times={times} was given; a straggler takes at least 1 times as long")
        self.times = times
        self._spent_s: float | None = None  # processor time, when the last mini-batch began

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Sleep for what the mini-batch before would have taken longer."""
        now_s = time.process_time() / torch.get_num_threads()
        last = trainer.global_rank == trainer.world_size - 1
        if last and self.times > 1 and self._spent_s is not None:
            time.sleep((self.times - 1) * (now_s - self._spent_s))
        self._spent_s = now_s

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A validation is no mini-batch."""
        self._spent_s = None
