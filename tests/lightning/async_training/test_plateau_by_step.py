"""``ReduceLROnPlateau`` with ``interval=step``: ``frequency`` counts the updates of all workers."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from hybridtrain import HybridStrategy
from tests.lightning.metamorphic import strategies
from tests.lightning.toys import Regression, distance, fit, make_trainer, regression_data
from tests.picking import by_default

EPOCHS = 3
CELLS = [
    (name, workers, frequency, accumulated)
    for name in strategies.ALL
    for workers in (1, 2, 3)
    for frequency in (1, 3, 10)
    for accumulated in (1, 2)
]
CHOSEN = [
    ("async", 2, 10, 1),
    ("hogwild", 3, 3, 1),
    ("downpour", 2, 10, 1),
    ("hybrid", 2, 3, 1),
]


class Plateau(Regression):
    """Notes ``global_step`` at the end of each epoch."""

    def __init__(self, frequency: int) -> None:
        super().__init__()
        self.frequency, self.ends = frequency, [0]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=1, min_lr=1e-4)
        about = {"interval": "step", "frequency": self.frequency, "monitor": "train/loss"}
        return [optimizer], [{"scheduler": schedule, **about}]

    def on_train_epoch_end(self) -> None:
        self.ends.append(self.trainer.global_step)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("strategy", "workers", "frequency", "accumulated"), by_default(CELLS, *CHOSEN)
)
def test_a_plateau_schedule_by_step_is_stepped_behind_every_update_that_is_due(
    strategy: str, workers: int, frequency: int, accumulated: int, tmp_path: Path
) -> None:
    module, trainer = fit(
        strategies.make(strategy, workers),
        workers,
        2,
        partial(Plateau, frequency),
        regression_data(44),
        max_epochs=EPOCHS,
        accumulate_grad_batches=accumulated,
    )
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    saved = torch.load(tmp_path / "end.ckpt", weights_only=False)
    (schedule,), (group,) = saved["lr_schedulers"], saved["optimizer_states"][0]["param_groups"]
    wants = trainer.strategy.requirements
    if not wants.whole_rounds:  # there each worker follows its own metric, as under DDP
        assert schedule["_last_lr"][0] == group["lr"]
    counts_own = wants.schedules_own_steps or (workers == 1 and wants.gathers > 1)
    if counts_own or (accumulated > 1 and workers > 1):  # each worker has a last, smaller group
        return
    made = [after - before for before, after in pairwise(module.ends)]
    batches = -(-22 // workers) if wants.whole_rounds else 22
    behind = [min(n * accumulated, batches) for updates in made for n in range(1, updates + 1)]
    due = sum(n % frequency == 0 for n in behind)
    rest = EPOCHS if wants.holds else 0  # an epoch's last update may be of what workers left
    assert due - rest <= schedule["last_epoch"] <= due


def rates(strategy: Any, workers: int, frequency: int, validates: bool) -> Any:
    """A module, and its schedule's number of steps."""
    pl.seed_everything(1, verbose=False)
    module, trainer = Plateau(frequency), make_trainer(strategy, workers, max_epochs=EPOCHS)
    loaders = [DataLoader(regression_data(44), 2)]
    loaders += [DataLoader(regression_data(8), 2)] if validates else []
    trainer.fit(module, *loaders)
    return module, trainer.lr_scheduler_configs[0].scheduler.last_epoch


@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize("workers", by_default([1, 2, 3], 2))
@pytest.mark.parametrize("frequency", by_default([1, 3], 1))
def test_a_plateau_schedule_of_workers_in_turn_gives_the_bits_of_one_device(
    workers: int, frequency: int, validates: bool
) -> None:
    ours = HybridStrategy("synchronous", keep_order=True)
    (one, due), (many, made) = (
        rates(strategy, n, frequency, validates) for strategy, n in (("auto", 1), (ours, workers))
    )
    assert due == made == EPOCHS * (22 // frequency)
    assert distance(one, many) == 0.0


@pytest.mark.parametrize("strategy", by_default(["async", "hogwild", "downpour"], "async"))
def test_a_plateau_schedule_is_also_stepped_behind_the_last_update_before_a_validation(
    strategy: str,
) -> None:
    assert rates(strategy, 3, 1, validates=True)[1] == EPOCHS * 22
