"""Random runs of workers that take random times: a replay repeats all, whoever was first.

Drawn are strategy, feature, sizes, number of workers, and how long each hook takes. Whatever a run
decides by the order in which workers come, and does not record, differs in some of them.
"""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from torch.utils.data import DataLoader

from hybridtrain.engine.recording import find_record, read_record
from hybridtrain.engine.recording.replayer import Replayed
from hybridtrain.lightning.replay.replay_fit import replay_fit
from tests.lightning.metamorphic import strategies
from tests.lightning.toys import Regression, make_trainer, regression_data
from tests.picking import but_slow
from tests.recording.test_replay import Manual, Rich

HOOKS = (
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_optimizer_step",
    "on_after_backward",
)
# Options of the trainer.
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulates": {"accumulate_grad_batches": 3},
    "clips": {"gradient_clip_val": 0.5},
    "reloads": {"reload_dataloaders_every_n_epochs": 2},
    "checks first": {"num_sanity_val_steps": 2},
    "by hand": {},
    "accumulates more and more": {},
    "may stop": {},
    "saves often": {"enable_checkpointing": True},
    "ends by steps": {"max_epochs": -1, "max_steps": 11},
    "limited": {"limit_train_batches": 3},
    "loses a worker": {},
    "has no gradient at times": {},
    "own sizes": {},
}


@dataclass(frozen=True)
class Case:
    """One run; ``share``: of the calls of hooks in which a worker sleeps."""

    strategy: str
    feature: str
    workers: int
    n: int
    size: int
    share: float
    seed: int

    def __str__(self) -> str:
        sizes = f"{self.workers}-{self.n} by {self.size}-{self.seed}"
        return f"{self.strategy}-{self.feature}-{sizes}"


def fits(feature: str, name: str, workers: int) -> bool:
    """Whether the strategy has it."""
    if name == "sandblaster":
        return feature in ("plain", "reloads", "checks first", "may stop", "saves often")
    if feature == "loses a worker":
        return workers > 1 and strategies.may_lose(name)
    return feature != "by hand" or "manual" in strategies.kinds(name, workers)


def drawn(seed: int) -> Case:
    """The same for the same seed."""
    rng = random.Random(seed)
    names = [name for name in strategies.OBSERVED if "hogwild" not in name]  # not recorded
    name, workers = rng.choice(names), rng.choice([1, 2, 2, 3, 4])
    feature = rng.choice([each for each in FEATURES if fits(each, name, workers)])
    n, size = rng.choice([24, 25, 31, 48]), rng.choice([2, 3, 4])
    return Case(name, feature, workers, n, size, rng.choice([0.05, 0.2, 0.5]), seed)


class Naps(pl.Callback):
    """Sleeps in some of the hooks; its random numbers are its own."""

    def __init__(self, case: Case) -> None:
        self.case, self.rng = case, random.Random()
        for hook in HOOKS:
            setattr(self, hook, self.nap)

    def setup(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        self.rng.seed(10 * self.case.seed + trainer.global_rank)

    def nap(self, *_: Any) -> None:
        if self.rng.random() < self.case.share:
            time.sleep(self.rng.choice([0.0005, 0.002, 0.008, 0.03]))


class Lost(pl.Callback):
    """A worker is killed behind one of its first mini-batches."""

    def __init__(self, mark: Path, case: Case) -> None:
        self.mark, self.worker, self.left = mark, case.seed % case.workers, case.seed % 7

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.left -= trainer.global_rank == self.worker
        if self.left < 0 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Running(torch.nn.Module):
    """Running means, also of one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(32)
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.norm(x) + 0.1 * self.mean


class Logs:
    """Before a module's class: it logs what all workers have seen."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        how: dict[str, Any] = {"on_step": False, "on_epoch": True, "reduce_fx": torch.sum}
        self.log("seen", float(len(batch[0])), sync_dist=True, **how)
        return super().training_step(batch, batch_idx)


class Scheduled(Logs, Rich):
    """With a schedule by step, and one by the validations' loss."""

    def __init__(self, absent: bool = False) -> None:
        super().__init__()
        self.net[1], self.absent = Running(), absent

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if self.absent and batch_idx % 4 == 1 else loss

    def configure_optimizers(self) -> Any:
        optimizer: Any = super().configure_optimizers()
        step = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        by_loss = {"scheduler": plateau, "monitor": "val/loss"}
        return [optimizer], [{"scheduler": step, "interval": "step"}, by_loss]


class ByHand(Logs, Manual):
    def __init__(self) -> None:
        super().__init__()
        self.net[1] = Running()


class Whole(Logs, Regression):
    """Its loss is a function of the parameters alone."""


def module_of(case: Case) -> pl.LightningModule:
    if case.strategy == "sandblaster":
        return Whole()
    if case.feature == "by hand":
        return ByHand()
    return Scheduled(case.feature == "has no gradient at times")


def callbacks_of(case: Case, folder: Path) -> list[pl.Callback]:
    callbacks: list[pl.Callback] = [Naps(case)]
    match case.feature:
        case "accumulates more and more":
            callbacks.append(GradientAccumulationScheduler({0: 1, 1: 3}))
        case "may stop":
            stops = EarlyStopping("val/loss", patience=case.seed % 3, min_delta=0.05)
            callbacks.append(stops)
        case "saves often":
            often: dict[str, Any] = {"every_n_train_steps": 3, "save_top_k": -1}
            callbacks.append(ModelCheckpoint(folder / "files", **often))
        case "loses a worker":
            callbacks.append(Lost(folder.parent / "lost", case))
    return callbacks


def trainer_of(case: Case, folder: Path, record: Path | None = None) -> pl.Trainer:
    options: dict[str, Any] = {"record": record}
    if case.feature == "own sizes":
        options["batch_size_per_worker"] = [1, 2, 3, 4][: case.workers]
    if case.feature == "loses a worker":
        options["on_failure"] = "continue"
    strategy = strategies.make(case.strategy, case.workers, **options)
    settings: dict[str, Any] = {"callbacks": callbacks_of(case, folder)} | FEATURES[case.feature]
    return make_trainer(strategy, case.workers, **settings)


def loaders_of(case: Case) -> dict[str, Any]:
    training = DataLoader(regression_data(case.n), case.size, shuffle=True)
    return {"train_dataloaders": training, "val_dataloaders": DataLoader(regression_data(10), 5)}


def came_home(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, Any]:
    """Metrics, weights, counts and schedules after a run."""
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    schedules = [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs]
    weights = {name: value.tolist() for name, value in module.state_dict().items()}
    counts = trainer.global_step, trainer.current_epoch
    return metrics | weights | {"counts": counts, "schedules": schedules}


CASES = [drawn(seed) for seed in range(150)]


@pytest.mark.wide
@pytest.mark.parametrize("case", but_slow([(c,) for c in CASES], lambda _, n: n > 1), ids=str)
@pytest.mark.filterwarnings("ignore")
def test_a_replay_of_workers_that_take_random_times_is_equal(case: Case, tmp_path: Path) -> None:
    folder, found = tmp_path / "record", list[dict[str, Any]]()
    for replays in (False, True):
        pl.seed_everything(7, verbose=False)
        module = module_of(case)
        own = tmp_path / ("again" if replays else "first")  # for checkpoints: both find it empty
        trainer = trainer_of(case, own, None if replays else folder)
        if replays:
            record = read_record(find_record(folder))
            report = replay_fit(record, trainer, module, **loaders_of(case))
            updates = record.told["end"]["stats"]["updates"]
            assert report == Replayed(len(record.cells), updates)
        else:
            trainer.fit(module, **loaders_of(case))
        found.append(came_home(trainer, module))
    assert found[0] == found[1]
