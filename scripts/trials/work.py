"""The training of a trial: a small regression that tells the samples of each mini-batch.

A validation and a checkpoint after each epoch, so that every phase of a run comes twice.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint, Timer
from torch.utils.data import DataLoader, TensorDataset

from hybridtrain import HybridStrategy

SEED, WIDTH, MOST_SAMPLES = 7, 24, 64
LR = 0.01


@dataclass(frozen=True)
class Size:
    """The size of the work; ``step_s``: a mini-batch lasts at least so long."""

    workers: int = 3
    samples: int = 96
    batch: int = 4
    epochs: int = 2
    step_s: float = 0.0


def numbers(n: int) -> TensorDataset:
    """Samples, what is to be learned of them, and their numbers."""
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sin().sum(1, keepdim=True), torch.arange(n))


def network() -> torch.nn.Module:
    """The same whenever it is asked for."""
    torch.manual_seed(SEED)
    layers = torch.nn.Linear(6, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1)
    return torch.nn.Sequential(*layers)


def loss_of(net: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the loss of one mini-batch."""
    return torch.nn.functional.mse_loss(net(x), y)


class Work(pl.LightningModule):
    """Learns it.

    Args:
        diary: shared by all processes: for each worker the samples it computes with, and how many.
        step_s: how long a mini-batch lasts at least.
    """

    def __init__(self, diary: torch.Tensor, step_s: float) -> None:
        super().__init__()
        self.net, self.diary, self.step_s = network(), diary, step_s

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y, ids = batch
        page = self.diary[self.global_rank]
        page[1 : 1 + len(ids)] = ids
        page[0] = len(ids)
        if self.step_s:
            time.sleep(self.step_s)
        return loss_of(self.net, x, y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = loss_of(self.net, *batch[:2])
        self.log("val/loss", loss, sync_dist=True, batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=LR)


def blank_diary(workers: int) -> torch.Tensor:
    """(W, 1 + samples of a mini-batch) int64, shared by what is forked from here."""
    return torch.zeros(workers, 1 + MOST_SAMPLES, dtype=torch.int64).share_memory_()


def train(
    policy: str,
    size: Size,
    folder: Path,
    readers: int = 0,
    seed: int = SEED,
    keep: int = -1,
    seconds: float | None = None,
    **options: Any,
) -> tuple[Work, pl.Trainer]:
    """One run; Lightning's own ``ddp`` as a process each, like ours. Raises what ends it.

    ``seconds``: end with the epoch in which they are over.
    """
    warnings.simplefilter("ignore")
    place = dict(PLACE)
    options |= place.pop("strategy", {})
    strategy: Any = "ddp_fork" if policy == "ddp" else HybridStrategy(policy, **options)
    saving = ModelCheckpoint(
        folder, save_top_k=keep, save_on_train_epoch_end=True, filename="{epoch}", monitor=None
    )
    clock = [] if seconds is None else [Timer({"seconds": seconds}, interval="epoch")]
    trainer = pl.Trainer(
        strategy=strategy,
        **{"accelerator": "cpu", "devices": size.workers} | place,
        max_epochs=size.epochs if seconds is None else -1,
        logger=False,
        callbacks=[saving, *clock],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    pl.seed_everything(seed, verbose=False)
    module = Work(blank_diary(size.workers), size.step_s)
    training = DataLoader(numbers(size.samples), size.batch, shuffle=True, num_workers=readers)
    watch = Observed(strategy, trainer, module)
    OBSERVED.append(watch)
    for listener in LISTENERS:
        listener(module.diary)
    trainer.fit(module, training, DataLoader(numbers(24), 4, num_workers=readers))
    return module, trainer


@dataclass
class Observed:
    """The objects of a run that has ended with an exception."""

    strategy: Any
    trainer: pl.Trainer
    module: Work


PLACE: dict[str, Any] = {}  # where workers compute, if not on CPUs: arguments of the trainer
OBSERVED: list[Observed] = []
LISTENERS: list[Callable[[torch.Tensor], object]] = []  # are given the diary before a run begins
