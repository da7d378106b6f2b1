"""Updates that workers make without the server are recorded in their order, and replayed."""

from __future__ import annotations

import os
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from hybridtrain import HybridStrategy
from hybridtrain.engine.protocol import step_log
from hybridtrain.engine.recording import Record, service_times
from tests.lightning.step.test_shared_rounds import CASES, STEPS, UNUSUAL
from tests.lightning.toys import Regression, regression_data
from tests.picking import by_default
from tests.recording.test_replay import Run, check_equal

POLICIES = ["hybrid", "async"]
MANY = 30  # steps of each worker in an epoch


def run_of(folder: Path, policy: str, **given: Any) -> Run:
    """A run of one of these cases, with a validation behind each epoch."""
    options = {"max_epochs": 2, **given}
    n, kind = options.pop("n", 2), options.pop("kind", Regression)
    make = options.pop("make", lambda p: torch.optim.Adam(p, lr=0.01))
    module = partial(kind, make, options.pop("schedule", None))
    steps = options.pop("steps", STEPS)
    data = partial(regression_data, 4 * steps * n - 3)
    return Run(folder, policy, n, module, data, trainer=options)


def share_made(record: Record) -> float:
    """The share of pushes that the server has not received."""
    return float(record.of_kind("Push")["made"].mean())


@pytest.mark.wide
@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("policy", "case"),
    by_default(
        [*product(POLICIES, CASES)],
        *product(["hybrid"], ["Adam", "three workers", "schedule", "accumulated"]),
        *product(["async"], ["SGD", "clipped", "max_steps"]),
    ),
)
def test_updates_that_workers_make_are_replayed_to_the_bit(
    tmp_path: Path, policy: str, case: str
) -> None:
    run = run_of(tmp_path, policy, **CASES[case])
    record = run.record()
    check_equal(run, record)
    assert share_made(record) > 0.5
    pushes, stats = record.of_kind("Push"), record.told["end"]["stats"]
    late = 4 * sum(stats["dropped"])  # what comes after the last update
    assert pushes["samples"].sum() == stats["samples"] + late


class ReadsStats(pl.Callback):
    """In the recorded run only, as a logger that goes by the clock may."""

    def __init__(self) -> None:
        self.here = os.getpid()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if os.getpid() != self.here:
            trainer.strategy.run_stats()  # type: ignore[attr-defined]


@pytest.mark.wide
@pytest.mark.parametrize("policy", POLICIES)
def test_when_statistics_are_read_does_not_matter(tmp_path: Path, policy: str) -> None:
    run = run_of(tmp_path, policy, **CASES["schedule"], callbacks=[ReadsStats()])
    record = run.record()
    check_equal(run, record)
    assert share_made(record) > 0.5


@pytest.mark.wide
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("policy", "what"),
    by_default([*product(POLICIES, UNUSUAL)], ("hybrid", "momentum"), ("async", "writes")),
)
def test_unusual_updates_are_made_by_the_server_again_in_a_replay(
    tmp_path: Path, policy: str, what: str
) -> None:
    options = {"make": lambda p: torch.optim.SGD(p, lr=0.01), **UNUSUAL[what]}
    run = run_of(tmp_path, policy, **options)
    record = run.record()
    check_equal(run, record)
    assert 0 < share_made(record) < 1


@pytest.mark.slow
@pytest.mark.parametrize("policy", by_default(POLICIES, "async"))
def test_the_log_may_be_shorter_than_the_run(
    tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size is that of a few updates, which the server reads in time."""
    monkeypatch.setattr(step_log, "_UPDATES", 5)
    run = run_of(tmp_path, policy, steps=MANY)
    record = run.record()
    check_equal(run, record)
    assert share_made(record) > 0.3
    assert len(record.of_kind("Push")) == 2 * 2 * MANY


class Late(pl.Callback):
    """Worker 1 is late, now and then."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step in (9, 15):
            time.sleep(0.3)


@pytest.mark.slow
def test_rounds_that_were_called_off_are_replayed(tmp_path: Path) -> None:
    run = run_of(tmp_path, "hybrid", callbacks=[Late()])
    record = run.record()
    check_equal(run, record)
    assert 0 < share_made(record) < 1


class Reads(pl.Callback):
    """Reads the statistics of the run or of its replay behind each mini-batch, as by a clock."""

    def __init__(self, where: str) -> None:
        self.where = where

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if (trainer.strategy.recording.instead is None) == (self.where == "run"):
            trainer.strategy.run_stats()


@pytest.mark.wide
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("policy", "where"),
    by_default([*product(POLICIES, ["run", "replay"])], ("hybrid", "run"), ("async", "replay")),
)
def test_statistics_may_be_read_at_any_time(tmp_path: Path, policy: str, where: str) -> None:
    run = run_of(tmp_path, policy, callbacks=[Reads(where)])
    check_equal(run, run.record())


@pytest.mark.wide
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("policy", "on_failure"),
    by_default(
        [*product(POLICIES, ["restart", "continue"])], ("hybrid", "continue"), ("async", "restart")
    ),
)
def test_a_run_that_was_prepared_for_losses_is_replayed(
    tmp_path: Path, policy: str, on_failure: str
) -> None:
    """Its workers tell the parent process of their progress, not the server."""
    run = run_of(tmp_path, policy)
    run.strategy["on_failure"] = on_failure
    check_equal(run, run.record())


@pytest.mark.wide
@pytest.mark.few(1)
@pytest.mark.parametrize("policy", POLICIES)
def test_each_push_has_the_time_that_its_worker_has_computed(tmp_path: Path, policy: str) -> None:
    class Slow(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            time.sleep(0.03)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            time.sleep(0.3)

    run = run_of(tmp_path, policy, kind=Slow)
    record = run.record()
    times = service_times(tmp_path)
    assert sum(map(len, times.values())) == len(record.of_kind("Push"))
    assert share_made(record) > 0.3
    assert all(each >= 0.03 for found in times.values() for each in found)


@pytest.mark.slow
def test_without_a_record_nothing_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_log.StepLog, "write", lambda *_: 1 / 0)
    run = run_of(tmp_path, "hybrid")
    trainer, module, options = run.made_anew()
    assert isinstance(trainer.strategy, HybridStrategy)
    trainer.fit(module, **options)
