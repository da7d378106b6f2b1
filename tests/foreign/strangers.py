"""Training other people's modules, and what is looked at afterwards.

Two references, both one ordinary process of Lightning's own (no strategy of ours):

- *the union*: W workers with batches of b against batches of W·b, in the order of torch's own
  ``DistributedSampler`` (Lightning shuffles for training wherever there are several workers). For
  modules without randomness.
- *the same for all*: every worker sees the same batches (``use_distributed_sampler=False``) and
  draws the same random numbers, so the mean of the gradients is each of them, to the bit. For
  modules with dropout or noise, which keep their own loaders untouched.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, DistributedSampler

import hybridtrain  # noqa: F401  (registers the strategies)

T = TypeVar("T")
SEED = 11


class Losses(pl.Callback):
    """Keeps every step's loss in memory shared with the workers."""

    def __init__(self, workers: int = 2, steps: int = 2000) -> None:
        self._kept = torch.full((workers, steps), torch.nan).share_memory_()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        index = trainer.fit_loop.total_batch_idx
        self._kept[trainer.global_rank, index] = outputs["loss"].detach()

    @property
    def values(self) -> torch.Tensor:
        """The mean over the workers, step by step."""
        means = self._kept.nanmean(dim=0)
        return means[~means.isnan()]

    def fell(self) -> bool:
        """Whether the last fifth of the run is better than the first."""
        part = max(1, len(self.values) // 5)
        return bool(self.values[-part:].mean() < self.values[:part].mean())


def trainer_of(strategy: Any, workers: int, **given: Any) -> pl.Trainer:
    """A trainer of three epochs that writes nothing, unless told otherwise."""
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 3,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(strategy=strategy, devices=workers, **options | given)


def train(
    module: pl.LightningModule, strategy: Any = "hybrid", workers: int = 2, **given: Any
) -> tuple[pl.Trainer, Losses]:
    """Fit the module; ``given`` are loaders or a datamodule, and options of the trainer."""
    data = {k: given.pop(k) for k in ("train_dataloaders", "datamodule") if k in given}
    losses = Losses(workers)
    trainer = trainer_of(strategy, workers, callbacks=[losses], **given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Workers begin from the seed, as ranks of DDP do; so one process must begin there too.
        pl.seed_everything(SEED, verbose=False)
        trainer.fit(module, **data)
    return trainer, losses


def alone(module: pl.LightningModule, **given: Any) -> tuple[pl.Trainer, Losses]:
    """Fit it as anybody would, in this process."""
    return train(module, "auto", 1, **given)


def union(data: Any, batch_size: int, seed: int = SEED, **options: Any) -> DataLoader[Any]:
    """The batches of all workers together, as one process would load them."""
    order: DistributedSampler[Any] = DistributedSampler(data, 1, 0, shuffle=True, seed=seed)
    return DataLoader(data, batch_size, sampler=order, **options)


def seeded(make: Callable[..., T], *args: Any) -> T:
    """Make something, after seeding everything as a user does before training."""
    pl.seed_everything(SEED, verbose=False)
    return make(*args)


def apart(one: torch.nn.Module, other: torch.nn.Module) -> float:
    """The largest difference in two state dictionaries, relative to each tensor's largest entry."""
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    found = 0.0
    for (name, mine), (other_name, theirs) in pairs:
        assert name == other_name and mine.dtype == theirs.dtype
        scale = max(float(theirs.abs().max()), 1e-3)  # a bias may be all but rounding
        found = max(found, float((mine - theirs).abs().max()) / scale)
    return found


def same_bits(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Whether two modules' state is equal to the bit."""
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)
