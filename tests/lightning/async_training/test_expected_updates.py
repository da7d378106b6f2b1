"""``estimated_stepping_batches`` is the number of updates that free-running workers will make."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, IterableDataset

from hybridtrain import HybridStrategy
from hybridtrain.engine.exchanges import Requirements, begin_policy, exchange_of
from hybridtrain.engine.policies import make_policy
from hybridtrain.engine.samplers import EpochPlan, Seeded
from hybridtrain.lightning.async_training.expected_updates import updates_of
from hybridtrain.lightning.data.user_loaders import batches_of
from tests.lightning.toys import Regression, fit, make_trainer, regression_data


class Asks(Regression):
    """Its learning rate falls to nothing in as many updates as it is told."""

    total: Any = None

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        self.total = self.trainer.estimated_stepping_batches
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=self.total)
        return [optimizer], [{"scheduler": cycle, "interval": "step"}]

    def on_train_end(self) -> None:
        self.steps = self.lr_schedulers().last_epoch


@pytest.mark.parametrize(
    ("policy", "workers", "options"),
    [
        ("async", 1, {}),
        ("async", 2, {"limit_train_batches": 3}),
        ("synchronous", 2, {"accumulate_grad_batches": 2}),
        ({"name": "k_batch_async", "k": 3}, 2, {}),
        pytest.param("hogwild", 2, {}, marks=pytest.mark.slow),
        pytest.param("async", 2, {"max_steps": 7}, marks=pytest.mark.slow),
    ],
)
def test_expected_updates_equal_the_updates_made_where_the_number_is_known(
    policy: Any, workers: int, options: Any
) -> None:
    strategy = HybridStrategy(policy=policy)
    module, trainer = fit(strategy, workers, 4, Asks, regression_data(43), max_epochs=2, **options)
    assert isinstance(module, Asks)
    # Workers that run freely may be some updates further on than a limit.
    assert 0 <= trainer.global_step - module.total < (workers if trainer.max_steps > 0 else 1)
    assert module.steps == module.total


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "fewer"),
    [("backup", 8), ("k_async", 8), ("softsync", 8), ("k_batch_sync", 8), ("ssp", 30)],
)
@pytest.mark.parametrize("accumulated", [1, 3])
def test_estimated_updates_are_near_and_no_scheduler_goes_beyond_them(
    policy: str, fewer: int, accumulated: int
) -> None:
    options: Any = {"accumulate_grad_batches": accumulated, "max_epochs": 2}
    strategy = HybridStrategy(policy=policy)
    module, trainer = fit(strategy, 3, 4, Asks, regression_data(120), **options)
    assert isinstance(module, Asks)
    assert module.total - fewer <= trainer.global_step <= module.total + 8
    assert module.steps == min(module.total, trainer.global_step)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(regression_data(8))


class Listens(Regression):
    def configure_optimizers(self) -> Any:
        self.total = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def test_expected_updates_of_a_stream_are_the_value_that_lightning_gives() -> None:
    module, trainer = Listens(), make_trainer("async", 1, max_epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(Stream(), batch_size=4))
    assert module.total == -1
    assert isinstance(trainer, pl.Trainer)


@pytest.mark.parametrize(
    ("policy", "workers", "updates"),
    [
        ("hybrid", 4, 2 * 25),
        ("async", 4, 2 * 100),
        ("hogwild", 4, 2 * 100),
        ("synchronous", 4, 2 * 100),
        ("ssp", 4, 2 * 100),
        ({"name": "ssp", "lead": 0}, 4, 2 * 25),
        ("backup", 4, 2 * 34),
        ({"name": "backup", "k": "auto"}, 4, 2 * 34),
        ({"name": "k_async", "k": 2}, 4, 2 * 50),
        ({"name": "k_batch_sync", "k": 7}, 4, 2 * 15),
        ({"name": "k_batch_async", "k": 7}, 4, 2 * 15),
        ({"name": "softsync", "n": 2}, 4, 2 * 50),
        ({"name": "switch", "at_update": 20}, 4, 20 + 120),
        ({"name": "switch", "at_update": 60}, 4, 2 * 25),
        ({"name": "switch", "patience": 3}, 4, 2 * 100),
    ],
    ids=str,
)
def test_expected_updates_follow_from_the_policy_and_the_number_of_workers(
    policy: Any, workers: int, updates: int
) -> None:
    made = make_policy(policy)
    requirements = begin_policy(made, exchange_of(made), workers)
    assert updates_of(requirements, pushes=100, epochs=2) == updates


def test_a_policy_that_says_nothing_makes_an_update_of_each() -> None:
    assert updates_of(Requirements(whole_rounds=False), 10, 3) == 30


@pytest.mark.parametrize(
    ("sizes", "drop_last", "batches"),
    [((4, 4), False, 11), ((4, 4), True, 10), ((2, 6), False, 11), ((50, 50), True, 0)],
)
def test_expected_mini_batches_follow_from_batch_sizes_and_drop_last(
    sizes: Any, drop_last: bool, batches: int
) -> None:
    plan = partial(EpochPlan, Seeded(43, None), 43)
    assert batches_of(plan(sizes, drop_last)) == batches
