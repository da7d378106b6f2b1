"""Somebody logs, saves and shows the bar at any time, and nobody else does."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning_utilities.core.rank_zero import rank_zero_only
from pytorch_lightning.callbacks import TQDMProgressBar
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.loggers.logger import DummyLogger
from pytorch_lightning.trainer.states import RunningStage

from hybridtrain.engine.worker.steps import Steps
from hybridtrain.engine.worker.surroundings import Listeners
from hybridtrain.engine.worker.tickets import Tickets
from hybridtrain.engine.worker.worker_group import WorkerGroup
from hybridtrain.lightning.async_training.counting import UpdateCount
from hybridtrain.lightning.failover.leader_failover import LeaderFailover
from hybridtrain.lightning.states.logger_state import keep_rows
from tests.lightning.toys import Regression, make_trainer


class Second:
    """The group of worker 1, and its listeners."""

    worker, is_leader, lost_at = 1, False, 0

    def __init__(self) -> None:
        self.listeners = Listeners()

    def learn(self, is_leader: bool) -> None:
        """From the server."""
        self.is_leader = is_leader
        self.listeners.change()


class Bar(TQDMProgressBar):
    """Draws nothing, and counts how often training was begun in it."""

    begun = 0

    def on_train_start(self, *_: Any) -> None:
        self.begun += 1


def test_a_deputy_shows_the_bar_until_worker_0_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    client, bar = Second(), Bar()
    trainer = make_trainer("hybrid", 2, callbacks=[bar], enable_progress_bar=True)
    trainer.strategy.connect(Regression())
    bar.disable()
    LeaderFailover(trainer, client, client.listeners)  # type: ignore[arg-type]
    seen = []
    for is_leader in (False, True, True, False, False, True):
        client.learn(is_leader)
        seen.append((bar.is_enabled, bar.begun, rank_zero_only.rank))
    assert seen == [
        (False, 0, 1),
        (True, 1, 0),
        (True, 1, 0),
        (False, 1, 1),
        (False, 1, 1),
        (True, 2, 0),
    ]


def rows_of(logger: CSVLogger) -> list[dict[str, str]]:
    with (Path(logger.log_dir) / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_and_columns_stay_while_two_processes_hand_over(tmp_path: Path) -> None:
    first, second = (CSVLogger(tmp_path, name="", version="log") for _ in range(2))
    first.log_metrics({"loss": 1.0}, 0)
    first.save()
    keep_rows(second)
    assert rows_of(first) == [{"loss": "1.0", "step": "0"}]
    first.log_metrics({"loss": 2.0, "an early column": 3.0}, 1)  # it has not heard of the other yet
    first.save()
    second.log_metrics({"loss": 4.0, "val": 5.0}, 2)
    second.save()
    found = [
        (row["step"], row["loss"], row["an early column"], row["val"]) for row in rows_of(first)
    ]
    assert found == [("0", "1.0", "", ""), ("1", "2.0", "3.0", ""), ("2", "4.0", "", "5.0")]


def client_with_nothing_offered() -> Any:
    """The parts of a client that counting needs."""
    return SimpleNamespace(
        n_workers=2,
        listeners=Listeners(),
        steps=Steps(WorkerGroup(0, 2), Tickets(0)),
        pushes=SimpleNamespace(settle=lambda: None),
    )


class Course:
    """A trainer and a client, as far as steps are counted."""

    def __init__(self, every: int) -> None:
        trainer = make_trainer("hybrid", 2, log_every_n_steps=every, logger=[DummyLogger()])
        trainer.strategy.connect(Regression())
        trainer.state.stage = RunningStage.TRAINING
        self.loop: Any = trainer.fit_loop.epoch_loop
        self.loop._should_accumulate = lambda: False
        self.client = client_with_nothing_offered()
        expected: Any = SimpleNamespace(limit=None)  # nobody has been told how many there will be
        absence: Any = SimpleNamespace(passed=False)  # each mini-batch counts
        self.trainer = trainer
        requirements = trainer.strategy.requirements
        worker: Any = SimpleNamespace(client=self.client, requirements=requirements)
        self.count = UpdateCount(trainer, worker, expected, absence)

    def step(self, version: int) -> int | None:
        """A mini-batch whose release has this version; the step of its row, if there is one."""
        self.client.steps.reach(version)
        self.loop.update_lr_schedulers("step", update_plateau_schedulers=False)
        due = self.trainer._logger_connector.should_update_logs
        row = self.loop._batches_that_stepped if due else None
        self.loop.update_lr_schedulers("step", update_plateau_schedulers=True)
        self.loop._batches_that_stepped += 1  # as Lightning does
        assert self.loop._batches_that_stepped == version
        return row


def test_rows_have_the_number_of_their_update_and_an_update_has_one_row() -> None:
    course = Course(every=1)
    assert [course.step(version) for version in (0, 1, 4, 4, 5)] == [None, 0, 3, None, 4]


def test_a_multiple_that_others_have_reached_is_logged_with_the_next_step() -> None:
    course = Course(every=5)
    assert [course.step(v) for v in (4, 5, 6, 9, 12, 14, 15, 31)] == [
        *(None, 4, None, None),
        *(11, None, 14, 30),
    ]


def test_who_takes_over_writes_no_row_of_an_update_that_may_have_one() -> None:
    course = Course(every=1)
    course.step(2)
    client = Second()
    client.lost_at = 9
    LeaderFailover(course.trainer, client, client.listeners)  # type: ignore[arg-type]
    client.learn(True)
    assert [course.step(version) for version in (3, 9, 10)] == [None, None, 9]


def test_a_validation_is_of_the_last_update_whoever_has_made_it() -> None:
    course = Course(every=1)
    course.step(3)
    course.count.begin_rows()  # it has no mini-batch any more, but is the one that logs
    course.client.steps.reach(8)
    course.count.reach(8)
    assert course.loop._batches_that_stepped == 7
