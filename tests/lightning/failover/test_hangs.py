"""Workers that hang or crawl under Lightning: where, who waits, and what is no hang."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, Trainer
from torch.utils.data import DataLoader

from hybridtrain import HybridStrategy
from hybridtrain.engine.monitoring import watchdog
from hybridtrain.engine.worlds.worker_exit import WorkerDied
from hybridtrain.errors import UserError
from tests.lightning.spawnable import SpawnRegression
from tests.lightning.toys import Regression, fit, regression_data

LIMIT_S = 1.5


class Place(Callback):
    """Worker 1 stays somewhere for so long, the second time that it comes there."""

    def __init__(self, where: str, seconds: float) -> None:
        self.where, self.seconds, self.visits = where, seconds, 0

    def stay(self, where: str, trainer: Trainer) -> None:
        self.visits += where == self.where and trainer.global_rank == 1
        if self.visits == 2:
            self.visits += 1
            time.sleep(self.seconds)

    def on_train_batch_end(self, trainer: Any, module: Any, out: Any, batch: Any, n: int) -> None:
        if n == 1:
            self.stay("callback", trainer)

    def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.stay("validation", trainer)

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self.stay("epoch", trainer)


class Staying(Regression):
    """Worker 1 stays in its third training step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and batch_idx == 2:
            self.stay()
        return super().training_step(batch, batch_idx)

    def stay(self) -> None:
        time.sleep(300)


def with_validation(module: type[Regression]) -> Regression:
    made = module()
    loader = DataLoader(regression_data(), batch_size=4)
    made.val_dataloader = lambda: loader  # type: ignore[method-assign]
    return made


def hang(policy: str, module: Regression, *callbacks: Callback) -> str:
    """The obituary."""
    strategy = HybridStrategy(policy, hang_timeout_s=LIMIT_S, stop_grace_s=5)
    with pytest.raises(WorkerDied) as caught:
        fit(strategy, 2, 4, module, callbacks=[*callbacks], max_epochs=3)
    return str(caught.value)


def test_a_worker_that_hangs_in_a_training_step_is_shown_with_the_line_it_hangs_in(
    capfd: pytest.CaptureFixture[str],
) -> None:
    obituary = hang("hybrid", Staying())
    assert obituary.startswith("worker 1 (process ")
    assert "hung and was killed: it has shown no sign of life for" in obituary
    assert "in a training step (number 3); meanwhile worker 0 waits for its release" in obituary
    shown = capfd.readouterr().err
    assert "may hang" in shown and "test_hangs.py" in shown and "in stay" in shown
    assert "child.py" not in shown, "where our own frames begin is of no interest"


@pytest.mark.parametrize(
    ("policy", "where", "words"),
    [
        pytest.param(
            "async",
            "validation",
            "in an evaluation step (number 2); meanwhile worker 0 waits for all in ",
            marks=pytest.mark.slow,
        ),
        ("hybrid", "epoch", "at the beginning or end of an epoch or of a validation; meanwhile "),
    ],
)
def test_who_is_missing_in_a_meeting_is_named(policy: str, where: str, words: str) -> None:
    obituary = hang(policy, with_validation(Regression), Place(where, 300))
    assert obituary.startswith("worker 1 (process ")
    assert words in obituary


@pytest.mark.slow
def test_a_first_step_that_takes_longer_than_the_limit_is_no_hang() -> None:
    class Compiling(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if self.global_rank == 1 and self.trainer.global_step == 0:
                time.sleep(2 * LIMIT_S)
            return super().training_step(batch, batch_idx)

    strategy = HybridStrategy(hang_timeout_s=LIMIT_S)
    _, trainer = fit(strategy, 2, 4, Compiling(), max_epochs=1)
    assert trainer.global_step == 6


@pytest.mark.slow
def test_a_spawned_worker_shows_its_stacks_as_well(capfd: pytest.CaptureFixture[str]) -> None:
    fault = {"worker": 1, "step": 2, "kind": "hang", "phase": "compute"}
    strategy = HybridStrategy(start_method="spawn", hang_timeout_s=2.0, faults=[fault])
    with pytest.raises(WorkerDied, match=r"worker 1 .* hung and was killed"):
        fit(strategy, 2, 4, SpawnRegression())
    shown = capfd.readouterr().err
    assert "may hang" in shown and "in training_step" in shown and "child.py" not in shown


@pytest.mark.slow
@pytest.mark.parametrize("where", ["callback", "validation", "epoch"])
@pytest.mark.parametrize("policy", ["hybrid", "async", "synchronous"])
def test_a_long_stay_anywhere_is_no_hang_unless_asked(policy: str, where: str) -> None:
    module = with_validation(Regression)
    fit(HybridStrategy(policy), 2, 4, module, callbacks=[Place(where, 3.0)], max_epochs=2)


def test_a_slow_worker_is_named_and_the_share_of_waiting_for_it(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "_LEAST_S", 1.0)

    class Crawling(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            time.sleep(0.2 if self.global_rank == 1 else 0.02)
            return super().training_step(batch, batch_idx)

    _, trainer = fit("hybrid", 3, 4, Crawling, max_epochs=2)
    stats = trainer.strategy.run_stats()
    assert stats["awaited_share"][1] > 0.5
    assert "worker 1 is slow: a mini-batch takes it " in capfd.readouterr().err


@pytest.mark.parametrize("value", [0, -3, "soon", True])
def test_what_is_no_time_is_refused(value: Any) -> None:
    with pytest.raises(
        UserError, match=r"hang_timeout_s=.*it must be a number from 0.1 on, auto, or null"
    ):
        HybridStrategy(hang_timeout_s=value)
