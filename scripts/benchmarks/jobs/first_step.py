"""A user's script, as short as it gets: trains until the first step is done. For ``startup``.

    python first_step.py STRATEGY WORKERS FILE

Worker 0 writes to FILE when that was, on the machine's monotonic clock.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import hybridtrain  # noqa: F401


class Small(pl.LightningModule):
    """A hundred thousand parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            *(torch.nn.Linear(64, 1350), torch.nn.ReLU(), torch.nn.Linear(1350, 10))
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


class Tell(pl.Callback):
    """Notes the end of the first step."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_rank == 0 and not self.file.exists():
            part = self.file.with_suffix(".part")
            part.write_text(str(time.monotonic()))
            part.rename(self.file)


if __name__ == "__main__":
    strategy, workers, place = sys.argv[1:]
    data = TensorDataset(torch.randn(512, 64), torch.randint(10, (512,)))
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=int(workers),
        max_steps=2,
        callbacks=[Tell(Path(place))],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Small(), DataLoader(data, 32, shuffle=True))
