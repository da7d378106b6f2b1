"""Random runs over several loaders of one length: a step has the same samples of each.

Drawn are the strategy, the loaders' mode and processes, sizes, who is slow, and who is lost where.
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
from pytorch_lightning.utilities import CombinedLoader
from torch.utils.data import DataLoader

from hybridtrain import HybridStrategy
from tests.lightning.failover.counting import STRATEGIES, Counting
from tests.lightning.failover.test_random_losses import Case as Loss
from tests.lightning.failover.test_random_losses import Lost, Slow
from tests.lightning.toys import make_trainer
from tests.picking import but_slow

EPOCHS = 2


@dataclass(frozen=True)
class Case:
    """``processes``: of each loader; ``lost``: the mini-batch behind which ``who`` is lost."""

    strategy: str
    workers: int
    mode: str
    processes: tuple[int, ...]
    n: int
    size: int
    step_s: float
    by: str
    lost: int | None
    who: int

    def __str__(self) -> str:
        lost = "" if self.lost is None else f"-{self.by} {self.who} at {self.lost}"
        loaders = "".join(map(str, self.processes))
        run = f"{self.strategy}-{self.workers}-{self.mode}-{loaders}"
        return f"{run}-{self.n} by {self.size}-{self.step_s}{lost}"

    @property
    def loaders(self) -> CombinedLoader:
        data = torch.arange(self.n)
        each = [DataLoader(data, self.size, num_workers=m) for m in self.processes]
        return CombinedLoader(each, self.mode)


def drawn(seed: int) -> Case:
    """The same for the same seed."""
    rng = random.Random(seed)
    workers, processes = rng.choice([2, 3, 4]), rng.choice([0, 0, 1])
    loaders = tuple(rng.choice([0, processes]) for _ in range(rng.choice([2, 2, 3])))
    return Case(
        rng.choice(STRATEGIES),
        workers,
        rng.choice(["min_size", "max_size", "max_size_cycle"]),
        loaders,
        rng.choice([24, 25, 31, 40]),
        rng.choice([1, 2, 3]),
        rng.choice([0.0, 0.0, 0.004, 0.01]),
        rng.choice(["restart", "continue"]),
        rng.choice([None, None, 0, 1, 3, 5]),
        rng.randrange(workers),
    )


class Pairs(Counting):
    """Refuses mini-batches of different samples."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        first, *others = batch
        assert first is not None
        for other in others:
            assert other is not None
            assert first.tolist() == other.tolist()
        return super().training_step(first, batch_idx)


def trained(case: Case, folder: Path, *callbacks: pl.Callback, **fit: Any) -> Pairs:
    """A module whose weights count the updates that each sample was part of."""
    again: dict[str, Any] = {"max_restarts": None} if case.by == "restart" else {}
    module = Pairs(case.n)
    strategy = HybridStrategy(case.strategy, on_failure=case.by, **again)
    options = {"max_epochs": EPOCHS, "enable_checkpointing": True}
    every = [Slow(case.step_s), *callbacks]
    trainer = make_trainer(strategy, case.workers, callbacks=every, **options)
    pl.seed_everything(1, verbose=False)
    trainer.fit(module, case.loaders, **fit)
    return module


CASES = [drawn(seed) for seed in range(100)]


@pytest.mark.sampled(25)
@pytest.mark.parametrize("case", but_slow([(c,) for c in CASES], lambda _, n: n > 3), ids=str)
@pytest.mark.filterwarnings("ignore:.*num_workers")
def test_a_step_has_the_same_samples_of_each_loader(case: Case, tmp_path: Path) -> None:
    callbacks: list[pl.Callback] = [ModelCheckpoint(tmp_path, enable_version_counter=False)]
    if case.lost is not None:
        where = ("on_train_batch_end", case.lost, (case.who,), case.workers)
        loss = Loss(case.strategy, case.by, "", *where, case.n, case.size, 0.0)
        callbacks.append(Lost(tmp_path, loss))
    counts = trained(case, tmp_path, *callbacks).w.round()
    if case.strategy == "hogwild":  # steps may be lost to one another
        assert counts.min() > 0
        assert counts.max() <= EPOCHS
    else:
        assert counts.tolist() == [EPOCHS] * case.n


@pytest.mark.sampled(15)
@pytest.mark.parametrize("case", but_slow([(c,) for c in CASES[:40]], lambda _, n: n > 1), ids=str)
@pytest.mark.filterwarnings("ignore")
def test_a_resumed_run_over_several_loaders_counts_each_sample_once_an_epoch(
    case: Case, tmp_path: Path
) -> None:
    trained(case, tmp_path, ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=2))
    saved = sorted(tmp_path.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    path = saved[len(saved) // 3]
    counts = trained(case, tmp_path, ckpt_path=path, weights_only=False).w.round()
    if case.strategy != "hogwild":  # files within an epoch: docs/limits.md
        assert counts.tolist() == [EPOCHS] * case.n
