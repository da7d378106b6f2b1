"""Fills caches of torch and Lightning before processes are forked that would each fill their own.

Answers of ``isinstance`` for abstract classes, versions of packages, modules that are imported
late: without them a worker that trains for a tenth of a second takes twice as long.
"""

from __future__ import annotations

import logging
import warnings

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset


class Tiny(pl.LightningModule):
    """Logs and validates."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        self.log("val", self.net(batch[0]).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def warm_up() -> None:
    """Train for a moment in this process; random numbers go on as if nothing had been."""
    log = logging.getLogger("pytorch_lightning")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loader = DataLoader(TensorDataset(torch.zeros(4, 2)), batch_size=2)
            trainer = pl.Trainer(
                accelerator="cpu",
                max_epochs=1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(Tiny(), loader, loader)
    finally:
        log.setLevel(level)
