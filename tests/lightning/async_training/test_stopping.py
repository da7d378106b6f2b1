"""``trainer.should_stop`` in one worker is that of all, and ends where no sample is lost."""

from __future__ import annotations

import time
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, LearningRateFinder
from torch.utils.data import DataLoader

from hybridtrain import HybridStrategy
from tests.lightning.toys import Recorder, Regression, make_trainer, regression_data


class Stops(Callback):
    """Some workers want to stop at the end of a mini-batch."""

    def __init__(self, at: int, *workers: int, early: bool = False) -> None:
        self.at, self.workers, self.early = at, workers, early

    def look(self, trainer: pl.Trainer) -> None:
        if trainer.global_rank in self.workers and self.is_time(trainer.global_step):
            trainer.should_stop = True

    def is_time(self, step: int) -> bool:
        return step == self.at

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.early:
            self.look(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not self.early:
            self.look(trainer)


def stopped(policy: Any, stops: Stops, **options: Any) -> tuple[pl.Trainer, Recorder]:
    data = Recorder(regression_data(240))
    trainer = make_trainer(HybridStrategy(policy=policy), 3, callbacks=[stops], **options)
    training = DataLoader(data, 8, shuffle=True)
    trainer.fit(Regression(), training, DataLoader(regression_data(6), 2))
    return trainer, data


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("stops", "steps"),
    [
        (Stops(4, 0, 1, 2), 4),  # all at once: there, as in one process
        (Stops(4, 1), 5),  # the others are a step ahead when they hear of it
        pytest.param(Stops(4, 0, 2), 5, marks=pytest.mark.slow),
        (Stops(4, 1, early=True), 6),  # known at the end of step 5
        (Stops(10, 2), 10),  # the last of the epoch
    ],
)
def test_in_lock_step_all_stop_behind_the_same_step(stops: Stops, steps: int) -> None:
    trainer, data = stopped("hybrid", stops)
    assert trainer.global_step == steps and trainer.should_stop
    assert trainer.strategy.run_stats()["samples"] == 24 * steps
    assert int(data.counts.max()) == 1


class Insists(Stops):
    """From a step on, at the end of each mini-batch."""

    def is_time(self, step: int) -> bool:
        return step >= self.at


@pytest.mark.parametrize(
    "exchange", ["gradient", {"name": "movement", "every": 3}, {"name": "streaming", "every": 6}]
)
def test_a_wish_that_is_repeated_ends_all_behind_the_same_step(exchange: Any) -> None:
    strategy = HybridStrategy("hybrid", exchange=exchange)
    trainer = make_trainer(strategy, 2, callbacks=[Insists(3, 1)])
    trainer.fit(Regression(), DataLoader(regression_data(240), 8))
    one, other = strategy.run_stats()["samples_per_worker"]
    assert one == other == 8 * trainer.global_step < 80


class StopsSlowly(Stops):
    """Worker 1 is slow: the answer to what it has handed over is there when its step ends."""

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        super().on_train_batch_end(trainer, *rest)
        time.sleep(0.1 * trainer.global_rank)


@pytest.mark.parametrize(
    ("policy", "stops"), [("hybrid", StopsSlowly(3, 1)), ("async", Insists(3, 0, 1))]
)
def test_a_wish_ends_workers_that_always_compute_until_an_answer_comes(
    policy: str, stops: Stops
) -> None:
    exchange = {"name": "accumulated", "n_push": 1, "n_fetch": 1, "fetch": "overlapped"}
    strategy = HybridStrategy(policy, exchange=exchange)
    trainer = make_trainer(strategy, 2, callbacks=[stops])
    trainer.fit(Regression(), DataLoader(regression_data(240), 8))
    one, other = strategy.run_stats()["samples_per_worker"]
    assert max(one, other) < 100 and (policy == "async" or one == other)


@pytest.mark.parametrize("at", [2, 3])
def test_while_a_fragment_travels_all_stop_behind_the_same_step(at: int) -> None:
    exchange = {"name": "streaming", "every": 6, "fragments": 2, "overlap": 2}
    strategy = HybridStrategy("hybrid", exchange=exchange)
    trainer = make_trainer(strategy, 2, callbacks=[StopsSlowly(at, 1)])
    trainer.fit(Regression(), DataLoader(regression_data(240), 8))
    one, other = strategy.run_stats()["samples_per_worker"]
    assert one == other == 8 * trainer.global_step < 120


def test_a_wish_counts_when_training_may_end() -> None:
    trainer, _ = stopped("hybrid", Stops(4, 1), min_epochs=2)
    assert trainer.current_epoch == 2


def test_accumulated_mini_batches_are_stepped_first() -> None:
    trainer, _ = stopped("hybrid", Stops(2, 1), accumulate_grad_batches=2)
    assert trainer.global_step in (3, 4)
    assert trainer.strategy.run_stats()["samples"] == 48 * trainer.global_step


@pytest.mark.parametrize("policy", ["async", "synchronous"])
def test_workers_that_run_freely_stop_soon(policy: str) -> None:
    trainer, _ = stopped(policy, Stops(4, 0, 1, 2))
    assert 4 <= trainer.global_step <= 12 and trainer.should_stop
    assert trainer.strategy.run_stats()["samples"] == 8 * trainer.global_step


class StopsAtLoss(Stops):
    """Sets ``should_stop`` in training alone, not in a search for a learning rate before it."""

    def look(self, trainer: Any) -> None:
        if trainer.lightning_module.trains:
            super().look(trainer)


class Searched(Regression):
    """Its loss explodes in a search for a learning rate, which then ends early in all workers."""

    lr = 0.01
    trains = False

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * (1.0 if self.trains else 10.0**self.trainer.global_step)

    def on_train_start(self) -> None:
        self.lr = 0.01
        callbacks: Any = self.trainer.callbacks
        searches = [x for x in callbacks if isinstance(x, LearningRateFinder)]
        self.trains = all(each.optimal_lr is not None for each in searches)


def test_a_search_that_ended_early_has_no_say_in_the_training_behind_it() -> None:
    callbacks = [LearningRateFinder(num_training_steps=12), StopsAtLoss(4, 1)]
    trainer = make_trainer("hybrid", 2, callbacks=callbacks, max_epochs=1)
    trainer.fit(Searched(), DataLoader(regression_data(240), 8))
    assert trainer.global_step == 5


class Followed(Regression):
    """A plateau by step, whose schedule notes when it is stepped."""

    def __init__(self) -> None:
        super().__init__()
        self.at: list[int] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        how = {"scheduler": schedule, "interval": "step", "monitor": "train/loss"}
        return {"optimizer": optimizer, "lr_scheduler": how}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(metric)
        self.at.append(self.trainer.global_step)


@pytest.mark.parametrize("workers", [(0, 1, 2), (1,)])
def test_a_mini_batch_that_is_not_begun_steps_no_schedule(workers: tuple[int, ...]) -> None:
    module = Followed()
    trainer = make_trainer("hybrid", 3, callbacks=[Stops(4, *workers)])
    trainer.fit(module, DataLoader(regression_data(240), 8))
    assert module.at == list(range(1, trainer.global_step + 1))
