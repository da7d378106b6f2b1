"""Small modules and data for the cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, VALIDATION_SAMPLES = 48, 24  # both divisible by 2 and 3 workers with mini-batches of 4

# Data sets are shuffled under every distributed strategy unless they are to be overfitted.
IN_ORDER: dict[str, Any] = {"overfit_batches": 1.0}


def regression(n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """``n`` samples of y = |x|² in four dimensions."""
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return TensorDataset(x, x.pow(2).sum(1, keepdim=True))


def even(batch: int, **options: Any) -> Mapping[str, Any]:
    """Loaders that all workers share without remainder."""
    return loaders(SAMPLES, VALIDATION_SAMPLES, batch, **options)


def loaders(n: int, n_val: int, batch: int, **options: Any) -> Mapping[str, Any]:
    """``n`` samples to train with, ``n_val`` to validate with."""
    options = {"shuffle": True} | options
    train = DataLoader(regression(n), batch_size=batch, **options)
    return {
        "train_dataloaders": train,
        "val_dataloaders": DataLoader(regression(n_val, seed=1), batch_size=batch),
    }


def in_float64(batch: int) -> Mapping[str, Any]:
    """The same amount of data in float64."""
    data = regression(SAMPLES, dtype=torch.float64)
    loader = DataLoader(data, batch_size=batch, shuffle=True)
    return {"train_dataloaders": loader, "val_dataloaders": DataLoader(data, batch_size=batch)}


def mlp() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """With momentum: whoever loses its state, or a gradient that is not there, shows."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


class Net(pl.LightningModule):
    """A small regression. What it puts into ``notes`` is compared, rank by rank.

    Args:
        optimizer: makes it from the parameters.
        schedule: makes a scheduler, or Lightning's dictionary with one, from the optimizer.
        net: makes the network.
    """

    def __init__(
        self,
        optimizer: Callable[[Any], Any] = sgd,
        schedule: Callable[[Any], Any] | None = None,
        net: Callable[[], torch.nn.Module] = mlp,
    ) -> None:
        super().__init__()
        self.net = net()
        self.make_optimizer, self.make_schedule = optimizer, schedule
        self.notes: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val/loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test/loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        if self.make_schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.make_schedule(optimizer)}


def fingerprint(batch: Any) -> list[float]:
    """One number per sample of a mini-batch, for telling samples apart."""
    if isinstance(batch, torch.Tensor):
        rows = batch.detach().double().cpu().reshape(len(batch), -1) if batch.ndim else batch[None]
        return rows.sum(-1).tolist() if batch.ndim else [float(batch)]
    if isinstance(batch, Mapping):
        return fingerprint(next(iter(batch.values())))
    if isinstance(batch, list | tuple) and batch:
        return fingerprint(batch[0])
    return []
