"""Whole rounds that workers make among themselves: the server's bits, and no messages."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from hybridtrain import HybridStrategy
from hybridtrain.engine.protocol.messages import name_of
from hybridtrain.engine.protocol.shared_round import ArrivalResult, SharedRound
from hybridtrain.engine.server.server import ParameterServer
from hybridtrain.lightning import launcher
from tests.lightning.toys import Regression, make_trainer, regression_data
from tests.picking import by_default
from tests.support.ends import first

STEPS = 20  # of an epoch


@pytest.fixture(autouse=True)
def patient(monkeypatch: Any) -> None:
    """No round is called off because this machine is slow."""
    monkeypatch.setattr("hybridtrain.engine.worker.makers.last_worker.PATIENCE_S", 5.0)


@pytest.fixture
def messages(monkeypatch: Any) -> Counter[str]:
    """What the server hears, by kind."""
    heard, on = Counter[str](), ParameterServer.on

    def counted(server: ParameterServer, event: Any) -> Any:
        heard[name_of(getattr(event, "message", event))] += 1
        return on(server, event)

    monkeypatch.setattr(ParameterServer, "on", counted)
    return heard


def by_the_server(**options: Any) -> Any:
    """As :func:`trained`, all rounds made by the server."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "workers_may_update", lambda strategy: False)
        return trained(**options)


def by_step(optimizer: Any) -> dict[str, Any]:
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * STEPS)
    return {"scheduler": schedule, "interval": "step"}


def trained(
    n: int = 2, callbacks: Any = (), make: Any = None, schedule: Any = None, **options: Any
) -> Any:
    """A trainer that has trained for two epochs of mini-batches of which the last is smaller."""
    pl.seed_everything(1, verbose=False)
    options = {"max_epochs": 2, **options}
    strategy = options.pop("strategy", None) or HybridStrategy("hybrid")
    kind = options.pop("kind", Regression)
    trainer = make_trainer(strategy, n, callbacks=list(callbacks), **options)
    make = make or (lambda p: torch.optim.Adam(p, lr=0.01))
    data = regression_data(4 * STEPS * n - 3)
    trainer.fit(kind(make, schedule), DataLoader(data, 4, shuffle=True))
    return trainer


CASES: dict[str, dict[str, Any]] = {
    "Adam": {},
    "three workers": {"n": 3},
    "SGD": {"make": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)},
    "schedule": {"schedule": by_step},
    "clipped": {"gradient_clip_val": 0.1},
    "accumulated": {"accumulate_grad_batches": 3},
    "max_steps": {"max_steps": 2 * STEPS - 7},
}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "case", by_default(CASES, "three workers", "schedule", "clipped", "accumulated")
)
def test_rounds_that_workers_make_have_the_bits_of_the_servers(
    case: str, messages: Counter[str]
) -> None:
    mine, n = trained(**CASES[case]), CASES[case].get("n", 2)
    assert messages["Push"] <= 10 * n, "nearly all rounds were made by workers"
    theirs = by_the_server(**CASES[case])
    for a, b in zip(mine.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(a, b)
    a, b = mine.strategy.run_stats(), theirs.strategy.run_stats()
    same = ("updates", "samples", "samples_per_worker", "staleness", "handed_over", "dropped")
    assert {key: a[key] for key in same} == {key: b[key] for key in same}
    assert mine.global_step == theirs.global_step
    assert sum(a["step_s"]) > 0 and all(0 <= share < 1 for share in a["waiting_share"])


class Slow(pl.Callback):
    """One worker is late, now and then."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step in (9, 15):
            time.sleep(0.3)


@pytest.mark.slow
def test_a_late_worker_is_waited_for_by_the_server(
    monkeypatch: pytest.MonkeyPatch, messages: Counter[str]
) -> None:
    monkeypatch.setattr("hybridtrain.engine.worker.makers.last_worker.PATIENCE_S", 0.1)
    late = trained(callbacks=[Slow()])
    assert messages["Push"] >= 6
    usual = trained()
    for a, b in zip(late.model.parameters(), usual.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert late.strategy.run_stats()["updates"] == usual.strategy.run_stats()["updates"]


class Late(torch.optim.lr_scheduler.LRScheduler):
    """Gives the optimizer momentum, which has to be kept from then on."""

    def get_lr(self) -> list[float]:  # type: ignore[override]
        for group in self.optimizer.param_groups:
            group["momentum"] = 0.9 if self.last_epoch >= 11 else 0.0
        return [0.01]


class Writes(Regression):
    """User code writes to a parameter in the middle."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.global_step == 11:
            self.net[0].weight.data.mul_(0.5)
        return super().training_step(batch, batch_idx)


UNUSUAL: dict[str, dict[str, Any]] = {
    "momentum": {"schedule": lambda o: {"scheduler": Late(o), "interval": "step"}},
    "writes": {"kind": Writes},
}


@pytest.mark.few(1)
@pytest.mark.parametrize("what", UNUSUAL)
def test_unusual_rounds_are_made_by_the_server_with_the_same_bits(
    what: str, messages: Counter[str]
) -> None:
    options = {"make": lambda p: torch.optim.SGD(p, lr=0.01), **UNUSUAL[what]}
    mine = trained(**options)
    assert 2 * 3 <= messages["Push"] < 2 * STEPS, "some rounds, but few"
    theirs = by_the_server(**options)
    for a, b in zip(mine.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
def test_workers_make_their_rounds_themselves_in_a_recorded_run_as_well(
    messages: Counter[str], tmp_path: Path
) -> None:
    trained(strategy=HybridStrategy("hybrid", record=tmp_path / "record"))
    assert messages["Push"] <= 10 * 2


def kills(patch: Any, when: str, flag: Path) -> None:
    """Once, a worker is killed in its 13th round."""
    original = SharedRound.come

    def die() -> None:
        if first(flag):
            os.kill(os.getpid(), signal.SIGKILL)

    def come(
        shared: SharedRound, worker: int, number: int, arrival: Any, make: Any
    ) -> ArrivalResult:
        def made(weights: Any) -> None:
            make(weights)
            if when == "makes" and number == 13:
                die()

        if number == 13 and when == "computes" and worker == 1:
            die()
        if number == 13 and when == "waits" and worker != 1 and not flag.exists():
            time.sleep(0.05)
        met = original(shared, worker, number, arrival, made)
        if number == 13 and when == "waits" and met is ArrivalResult.WAITS and worker == 1:
            die()
        return met

    patch.setattr(SharedRound, "come", come)


@pytest.mark.few(1)
@pytest.mark.parametrize("when", by_default(["computes", "waits", "makes"], "waits", "makes"))
def test_a_killed_worker_leaves_a_whole_update_or_none(
    when: str, monkeypatch: pytest.MonkeyPatch, messages: Counter[str], tmp_path: Path
) -> None:
    """With another process in its place, the bits are those of a run in which nothing happens."""
    usual = trained(3)
    kills(monkeypatch, when, tmp_path / "killed")
    again = trained(3, strategy=HybridStrategy("hybrid", on_failure="restart"))
    assert (tmp_path / "killed").exists() and messages["Restarted"] == 1
    for a, b in zip(again.model.parameters(), usual.model.parameters(), strict=True):
        assert torch.equal(a, b)
    a, b = again.strategy.run_stats(), usual.strategy.run_stats()
    assert (a["updates"], a["samples"]) == (b["updates"], b["samples"])


@pytest.mark.parametrize("when", by_default(["computes", "waits", "makes"], "makes"))
def test_the_other_workers_go_on_without_a_killed_one(
    when: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kills(monkeypatch, when, tmp_path / "killed")
    trainer = trained(3, strategy=HybridStrategy("hybrid", on_failure="continue"))
    stats = trainer.strategy.run_stats()
    assert min(stats["samples_per_worker"]) in (4 * 12, 4 * 13)
    assert trainer.global_step == stats["updates"]


def test_a_checkpoint_has_the_learning_rate_of_its_step(tmp_path: Path) -> None:
    trainer = trained(schedule=by_step, max_steps=13)
    trainer.save_checkpoint(path := tmp_path / "some.ckpt")
    saved = torch.load(path, weights_only=True)["optimizer_states"][0]
    plain = torch.optim.SGD([torch.zeros(1)], lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(plain, 2 * STEPS)
    for _ in range(13):
        plain.step()
        schedule.step()
    assert saved["param_groups"][0]["lr"] == plain.param_groups[0]["lr"]
    assert {float(state["step"]) for state in saved["state"].values()} == {13.0}


class Fails(Regression):
    """Worker 1 fails in the second epoch, when nobody has been told of its learning rate."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.current_epoch == 1 and batch_idx == 5 and self.global_rank == 1:
            time.sleep(0.2)
            raise LookupError("broken off")
        return super().training_step(batch, batch_idx)


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["hybrid", "async", "hogwild"])
def test_a_run_that_is_broken_off_saves_the_learning_rate_of_its_epoch(
    policy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("hybridtrain.engine.worker.makers.in_place._TELL_S", 1e9)
    keep = ModelCheckpoint(tmp_path)
    options: dict[str, Any] = {"callbacks": [keep], "enable_checkpointing": True}
    by_epoch = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.1)
    with pytest.raises(LookupError, match="broken off"):
        trained(strategy=HybridStrategy(policy), schedule=by_epoch, kind=Fails, **options)
    saved = torch.load(tmp_path / "interrupted/interrupted.ckpt", weights_only=True)
    rate, schedule = (saved[name][0] for name in ("optimizer_states", "lr_schedulers"))
    assert rate["param_groups"][0]["lr"] == schedule["_last_lr"][0] < 0.002
