"""Random runs go on from random checkpoints: each sample is in one update of an epoch, over both.

Drawn are both strategies, both numbers of workers and sizes of mini-batches, a feature, how often a
checkpoint is written, which of them is taken, and whether the second run loses a worker.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from hybridtrain import HybridStrategy
from tests.lightning.failover.counting import STRATEGIES, Scheduled, Seen
from tests.lightning.failover.test_random_losses import Case as Loss
from tests.lightning.failover.test_random_losses import Lost, Slow
from tests.lightning.toys import make_trainer
from tests.picking import but_slow

EPOCHS = 3
# Options of the trainer.
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulates": {"accumulate_grad_batches": 3},
    "validates seldom": {"check_val_every_n_epoch": 2},
    "checks first": {"num_sanity_val_steps": 2},
    "reloads": {"reload_dataloaders_every_n_epochs": 2},
}


@dataclass(frozen=True)
class Part:
    """One of the two runs."""

    strategy: str
    workers: int
    size: int
    step_s: float

    def __str__(self) -> str:
        return f"{self.strategy} {self.workers} by {self.size}"


@dataclass(frozen=True)
class Case:
    """``every``: updates between two checkpoints; ``choice``: which one, from 0 to 1; ``lost``: the
    mini-batch behind which the second run loses a worker, ``by``: what it does then."""

    first: Part
    second: Part
    feature: str
    n: int
    every: int
    choice: float
    lost: int | None
    by: str

    def __str__(self) -> str:
        lost = "" if self.lost is None else f" {self.by} {self.lost}"
        return f"{self.first}-{self.second}-{self.feature}-{self.n}-{self.every}{lost}"


def drawn(seed: int) -> Case:
    """The same for the same seed."""
    rng = random.Random(seed)

    def part() -> Part:
        workers, size = rng.choice([1, 2, 3, 4]), rng.choice([1, 2, 3])
        return Part(rng.choice(STRATEGIES), workers, size, rng.choice([0.0, 0.004]))

    first, second = part(), part()
    if rng.random() < 0.3:
        second = first
    feature, n = rng.choice([*FEATURES]), rng.choice([24, 25, 31, 40])
    lost, by = rng.choice([None, None, 0, 1, 3]), rng.choice(["restart", "continue"])
    by = "restart" if second.workers == 1 else by
    return Case(first, second, feature, n, rng.choice([1, 2, 3, 5]), rng.random(), lost, by)


def trained(case: Case, part: Part, folder: Path, *callbacks: pl.Callback, **fit: Any) -> Any:
    """A module, and its trainer."""
    module, data = Scheduled(case.n), torch.arange(case.n)
    again = {"on_failure": case.by} if case.lost is not None else {}
    if again.get("on_failure") == "restart":
        again["max_restarts"] = None  # type: ignore[assignment]
    strategy = HybridStrategy(part.strategy, **again)
    options = FEATURES[case.feature] | {"max_epochs": EPOCHS, "enable_checkpointing": True}
    every = [Slow(part.step_s), *callbacks]
    trainer = make_trainer(strategy, part.workers, callbacks=every, **options)
    pl.seed_everything(1, verbose=False)
    loaders = DataLoader(data, part.size, shuffle=True), DataLoader(data, part.size)
    trainer.fit(module, *loaders, **fit)
    return module, trainer


CASES = [drawn(seed) for seed in range(150)]


@pytest.mark.sampled(30)
@pytest.mark.parametrize("case", but_slow([(c,) for c in CASES], lambda _, n: n > 1), ids=str)
@pytest.mark.filterwarnings("ignore")
def test_each_sample_counts_once_an_epoch_over_both_runs(case: Case, tmp_path: Path) -> None:
    files = tmp_path / "files"
    saves = ModelCheckpoint(files, save_top_k=-1, every_n_train_steps=case.every)
    trained(case, case.first, tmp_path, saves)
    saved = sorted(files.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    path = saved[int(case.choice * len(saved))]

    seen, callbacks = Seen(tmp_path), list[pl.Callback]()
    if case.lost is not None:
        workers = case.second.workers
        where = ("on_train_batch_end", case.lost, (workers - 1,), workers)
        loss = Loss(case.second.strategy, case.by, "", *where, case.n, case.second.size, 0.0)
        callbacks.append(Lost(tmp_path, loss))
    options = {"ckpt_path": path, "weights_only": False}
    module, trainer = trained(case, case.second, tmp_path, seen, *callbacks, **options)
    assert trainer.current_epoch == EPOCHS
    both = case.first.strategy, case.second.strategy
    if "hogwild" in both:  # steps may be lost to one another, or made while a file was copied
        assert module.w.round().min() > 0
        assert module.w.round().max() <= EPOCHS + (both[0] == "hogwild")
    else:
        assert module.w.round().tolist() == [EPOCHS] * case.n
    if seen.path.exists():
        seen.are(case.n)
    schedules = [config.scheduler.last_epoch for config in trainer.lr_scheduler_configs]
    assert schedules == [trainer.global_step, EPOCHS]
