"""Callbacks of ``experiment=to_target``: its end, and a worker that is slowed down."""

from __future__ import annotations

import time
from typing import Annotated, Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping

from hybridtrain.util.option_types import Range, typed


class AtTarget(EarlyStopping):
    """Ends training once a metric has reached a value, to seven digits.

    Lightning's own threshold must be passed, and 0.95 in 32 bits is less than 0.95.

    Args:
        monitor: the metric.
        mode: ``min`` or ``max``.
        value: the target; null: there is none.
    """

    def __init__(self, monitor: str, mode: str, value: float | None) -> None:
        threshold = value
        if value is not None:
            slack = max(abs(value), 1e-30) * 1e-7
            threshold = value + slack if mode == "min" else value - slack
        super().__init__(monitor, patience=10**6, mode=mode, stopping_threshold=threshold)


class Straggler(pl.Callback):
    """Lets the last worker take ``times`` as long for each mini-batch, by sleeping.

    The sleep is proportional to the processor time that the worker spent on the previous
    mini-batch, so it scales with the work and not with waiting. Sleeping takes no core from the
    other workers, like a slower device. Where workers share cores, all take longer than their
    processor time, so the last one is less than ``times`` slower. For workers on the CPU.

    Args:
        times: at least 1; 1 changes nothing.

    Raises:
        UserError: if ``times`` is below 1.
    """

    @typed("")
    def __init__(self, times: Annotated[float, Range(1)] = 3.0) -> None:
        self.times = times
        self._spent_s: float | None = None  # processor time, when the last mini-batch began

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Sleep for the time that the previous mini-batch would have taken longer."""
        now_s = time.process_time() / torch.get_num_threads()
        last = trainer.global_rank == trainer.world_size - 1
        if last and self.times > 1 and self._spent_s is not None:
            time.sleep((self.times - 1) * (now_s - self._spent_s))
        self._spent_s = now_s

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Do not count the validation as a mini-batch."""
        self._spent_s = None
