"""Workers are lost in random runs: each sample is in one update of an epoch, and validated.

Drawn are strategy, choice, feature, sizes, number of workers, who is lost where, and how long a
step takes. Most faults needed two of these together, so there are many cases, and each is cheap.
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

from hybridtrain import HybridStrategy
from tests.lightning.failover.counting import STRATEGIES, ByHand, Scheduled, Seen, counts_are
from tests.lightning.toys import make_trainer
from tests.picking import but_slow

EPOCHS = 3
HOOKS = (
    ("on_train_batch_start", 4),
    ("on_train_batch_start", 8),
    ("on_train_batch_end", 1),
    ("on_train_batch_end", 4),
    ("on_train_batch_end", 5),
    ("on_train_batch_end", 6),
    ("on_train_epoch_start", 1),
    ("on_train_epoch_end", 0),
)
# Options of the trainer.
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulates": {"accumulate_grad_batches": 3},
    "clips": {"gradient_clip_val": 100.0},
    "reloads": {"reload_dataloaders_every_n_epochs": 2},
    "validates seldom": {"check_val_every_n_epoch": 2},
    "checks first": {"num_sanity_val_steps": 2},
    "by hand": {},
    "accumulates more and more": {},
    "may stop": {},
    "saves often": {"enable_checkpointing": True},
    "own sizes": {},
}


@dataclass(frozen=True)
class Case:
    """One run; ``left``: times that a worker of ``lost`` comes to ``hook`` before it is lost."""

    strategy: str
    choice: str
    feature: str
    hook: str
    left: int
    lost: tuple[int, ...]
    workers: int
    n: int
    size: int
    step_s: float

    def __str__(self) -> str:
        lost = "".join(map(str, self.lost))
        where = f"{self.hook}-{self.left}-{lost} of {self.workers}-{self.n} by {self.size}"
        return f"{self.strategy}-{self.choice}-{self.feature}-{where}"


def drawn(seed: int) -> Case:
    """The same for the same seed."""
    rng = random.Random(seed)
    workers, choice = rng.choice([2, 3, 3, 4]), rng.choice(["restart", "continue"])
    lost = [(0,), (1,), (workers - 1,), *[tuple(range(workers))] * (choice == "restart")]
    strategy, feature = rng.choice([*STRATEGIES, "hybrid", "hybrid"]), rng.choice([*FEATURES])
    if feature == "by hand" and strategy in ("hybrid", "backup"):  # docs/failures.md
        feature = "plain"
    hook, left = rng.choice(HOOKS)
    n, size = rng.choice([24, 25, 31, 40]), rng.choice([1, 2, 3])
    step_s = rng.choice([0.0, 0.0, 0.004, 0.02])
    who = rng.choice(lost)
    return Case(strategy, choice, feature, hook, left, who, workers, n, size, step_s)


class Lost(pl.Callback):
    """These workers are killed, each once."""

    def __init__(self, folder: Path, case: Any) -> None:
        self.folder, self.case, self.left = folder, case, case.left
        setattr(self, case.hook, self.come)

    def come(self, trainer: Any, *_: Any) -> None:
        mark = self.folder / f"lost {trainer.global_rank}"
        if self.left <= 0 and trainer.global_rank in self.case.lost and not mark.exists():
            mark.touch()
            self.die()
        self.left -= 1

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Slow(pl.Callback):
    """A mini-batch takes worker 0 three times as long."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        time.sleep(self.step_s * (3 if trainer.global_rank == 0 else 1))


def callbacks_of(case: Case, folder: Path) -> list[pl.Callback]:
    match case.feature:
        case "accumulates more and more":
            return [GradientAccumulationScheduler({0: 1, 1: 3})]
        case "may stop":
            return [EarlyStopping("seen", patience=50)]
        case "saves often":
            return [ModelCheckpoint(folder / "files", save_top_k=-1, every_n_train_steps=3)]
    return []


FOUND = Case(  # by a longer search: a callback had changed how many are accumulated
    *("hybrid", "restart", "accumulates more and more", "on_train_batch_end", 6),
    *((0, 1, 2), 3, 31, 3, 0.0),
)
CASES = [FOUND, *(drawn(seed) for seed in range(150))]


@pytest.mark.parametrize("case", but_slow([(c,) for c in CASES], lambda _, n: n > 1), ids=str)
def test_each_sample_counts_once_an_epoch_and_each_validation_is_of_all(
    tmp_path: Path, case: Case
) -> None:
    module = ByHand(case.n) if case.feature == "by hand" else Scheduled(case.n)
    options: dict[str, Any] = {"max_restarts": None} if case.choice == "restart" else {}
    if case.feature == "own sizes":
        options["batch_size_per_worker"] = [1, 2, 3, 4][: case.workers]
    strategy = HybridStrategy(case.strategy, on_failure=case.choice, **options)
    lost, seen = Lost(tmp_path, case), Seen(tmp_path)
    callbacks = [Slow(case.step_s), lost, seen, *callbacks_of(case, tmp_path)]
    trainer = make_trainer(
        strategy, case.workers, max_epochs=EPOCHS, callbacks=callbacks, **FEATURES[case.feature]
    )
    data = torch.arange(case.n)
    pl.seed_everything(1, verbose=False)
    trainer.fit(module, DataLoader(data, case.size, shuffle=True), DataLoader(data, case.size))
    assert trainer.current_epoch == EPOCHS
    assert list(tmp_path.glob("lost *")) or "epoch" not in case.hook  # others may not come so far
    counts_are(module, strategy, EPOCHS)
    seen.are(case.n)
    schedules = [config.scheduler.last_epoch for config in trainer.lr_scheduler_configs]
    assert schedules in ([], [trainer.global_step, EPOCHS])
