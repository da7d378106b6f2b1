"""Small modules and data for the tests of the Lightning glue."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import hybridtrain  # noqa: F401  (registers the strategies)


def regression_data(n: int = 48, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """``n`` samples of y = |x|² in four dimensions."""
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(0), dtype=dtype)
    return TensorDataset(x, x.pow(2).sum(1, keepdim=True))


class Regression(pl.LightningModule):
    """A two-layer net; ``make_optimizer`` gets the parameters."""

    def __init__(
        self, make_optimizer: Callable[[Any], Any] | None = None, schedule: Any = None
    ) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
        )
        self.make_optimizer = make_optimizer or (lambda p: torch.optim.SGD(p, lr=0.01))
        self.schedule = schedule

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("val/loss", loss, sync_dist=True, batch_size=len(batch[0]))

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        if self.schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.schedule(optimizer)}


class Manual:
    """Before a module's class: it steps its optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def make_trainer(strategy: Any, workers: int, **options: Any) -> pl.Trainer:
    """A quiet CPU trainer."""
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 3,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(strategy=strategy, devices=workers, **(settings | options))


def fit(
    strategy: Any,
    workers: int,
    batch_size: int,
    module: pl.LightningModule | Callable[[], pl.LightningModule] = Regression,
    data: Dataset[Any] | None = None,
    ckpt_path: str | None = None,
    **options: Any,
) -> tuple[pl.LightningModule, pl.Trainer]:
    """Train and return the module and its trainer. Same seed, same data, whatever the strategy."""
    pl.seed_everything(7, verbose=False)
    if not isinstance(module, pl.LightningModule):
        module = module()
    trainer = make_trainer(strategy, workers, **options)
    loader = DataLoader(
        data if data is not None else regression_data(), batch_size=batch_size, shuffle=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader, ckpt_path=ckpt_path)
    return module, trainer


def flat(module: torch.nn.Module) -> torch.Tensor:
    """All parameters in one vector, float64."""
    return torch.cat([p.detach().double().flatten() for p in module.parameters()])


def distance(one: torch.nn.Module, other: torch.nn.Module) -> float:
    """The largest difference between two modules' parameters."""
    return float((flat(one) - flat(other)).abs().max())


class Recorder(Dataset[Any]):
    """Writes down, in shared memory, how often each index was asked for."""

    def __init__(self, data: Sequence[Any] | TensorDataset) -> None:
        self.data = data
        self.counts = torch.zeros(len(data), dtype=torch.int64).share_memory_()  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.data)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        self.counts[index] += 1
        return self.data[index]
