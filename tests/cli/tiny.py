"""A module and data small enough that a run takes no time, and that tell what they have seen."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

N = 24  # samples; 2, 3 and 4 workers share them evenly


class TinyModule(pl.LightningModule):
    """Linear regression. ``diary``: a folder where each process notes the samples it trains on."""

    def __init__(
        self,
        width: int = 1,
        diary: str | None = None,
        fail_at: int | None = None,
        sleep_s: float = 0.0,
        leaves: str | None = None,
        lr: float = 0.01,
    ) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, width), nn.Linear(width, 1))
        self.diary, self.fail_at, self.sleep_s, self.lr = diary, fail_at, sleep_s, lr
        if leaves is not None:  # a variable that no other job may find
            assert leaves not in os.environ, f"{leaves} was left by another job"
            os.environ[leaves] = "1"

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, index = batch
        if self.fail_at is not None and self.global_step >= self.fail_at:
            raise RuntimeError("this module fails on purpose")
        if self.diary is not None:
            with (Path(self.diary) / f"{os.getpid()}.txt").open("a") as page:
                page.writelines(f"{self.current_epoch} {int(i)}\n" for i in index)
        time.sleep(self.sleep_s)
        loss = (self.net(x) - 2 * x).square().mean()
        self.log(
            "train/loss", loss, on_epoch=True, on_step=False, sync_dist=True, batch_size=len(x)
        )
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val/size", float(len(batch[0])), sync_dist=True, batch_size=len(batch[0]))

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test/n", float(len(batch[0])), reduce_fx="sum", sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class ByHand(TinyModule):
    """Steps ``n`` optimizers in every ``every``-th mini-batch."""

    def __init__(self, n: int = 2, every: int = 1) -> None:
        super().__init__()
        self.automatic_optimization, self.n, self.every = False, n, every

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(super().training_step(batch, batch_idx))
        self.log("train/now", float(self.current_epoch))
        optimizers: Any = self.optimizers()
        for each in (optimizers if self.n > 1 else [optimizers]) * (
            not (batch_idx + 1) % self.every
        ):
            each.step()
            each.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[i].parameters(), lr=0.01) for i in range(self.n)]


class TinyData(pl.LightningDataModule):
    """Samples that know their number."""

    def __init__(self, batch_size: int = 2, n: int = N) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.set = TensorDataset(torch.linspace(-1, 1, n).unsqueeze(1), torch.arange(n))

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.set, batch_size=self.batch_size)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.set, batch_size=5)


TINY = [
    "model._target_=tests.cli.tiny.TinyModule",
    "data._target_=tests.cli.tiny.TinyData",
    "trainer.max_epochs=2",
    "trainer.accelerator=cpu",
]


class Removal(pl.Callback):
    """Removes this directory behind the first epoch."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 0 and trainer.is_global_zero:
            shutil.rmtree(self.directory)
