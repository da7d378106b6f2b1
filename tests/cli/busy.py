"""A module and data that keep a run busy, with data loaders in processes of their own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from tests.cli.tiny import TinyData, TinyModule

BUSY = [
    "model._target_=tests.cli.busy.BusyModule",
    "data._target_=tests.cli.busy.BusyData",
    "trainer.accelerator=cpu",
    "trainer.max_epochs=100000",
    "trainer.devices=2",
    "model.sleep_s=0.01",
    "hydra.run.dir=.",
]


class BusyModule(TinyModule):
    """Leaves the file ``reached`` in its third step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2 and self.global_rank == 0:
            Path("reached").touch()
        return loss


class Numbers(Dataset[Any]):
    """Samples; with ``stuck``, each loader's second process soon waits for ever."""

    def __init__(self, n: int, stuck: bool) -> None:
        self.n, self.stuck, self.given = n, stuck, 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        loader = get_worker_info()
        self.given += 1
        while self.stuck and loader is not None and loader.id == 1 and self.given > 12:
            time.sleep(1)
        return torch.tensor([index / self.n]), index


class BusyData(TinyData):
    """Mini-batches of two, made by ``loaders`` processes for each worker."""

    def __init__(self, loaders: int = 2, stuck: bool = False, n: int = 48) -> None:
        super().__init__()
        self.numbers, self.loaders = Numbers(n, stuck), loaders

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.numbers, batch_size=2, num_workers=self.loaders)

    def val_dataloader(self) -> list[Any]:
        return []

    def test_dataloader(self) -> list[Any]:
        return []
