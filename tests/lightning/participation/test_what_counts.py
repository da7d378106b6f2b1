"""What does not count leaves no trace: in logs, metrics, buffers, hooks and callbacks."""

from __future__ import annotations

import time
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torchmetrics
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from hybridtrain import HybridStrategy
from tests.lightning.toys import Recorder, Regression, distance, make_trainer, regression_data
from tests.picking import by_default

EVERY_POLICY: list[Any] = [
    "hybrid",
    "synchronous",
    "backup",
    {"name": "backup", "k": "auto"},
    "k_async",
    "k_batch_sync",
    "k_batch_async",
    "softsync",
    "ssp",
    "async",
    "hogwild",
    {"name": "switch", "first": "hybrid", "then": "async", "at_update": 2},
]


class Counting(pl.LightningModule):
    """Logs how many samples it sees, and their mean, in every way that there is."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.sum, self.mean = torchmetrics.SumMetric(), torchmetrics.MeanMetric()
        self.largest, self.cat = torchmetrics.MaxMetric(), torchmetrics.CatMetric()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("assigned", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (x,) = batch
        n, common = float(len(x)), {"on_step": False, "on_epoch": True}
        self.log("samples", n, reduce_fx="sum", sync_dist=True, **common)
        self.log("mean", x.mean(), sync_dist=True, batch_size=len(x), **common)
        self.log("max", x.max(), reduce_fx="max", sync_dist=True, **common)
        self.sum.update(n)
        self.mean.update(x)
        self.largest.update(x)
        self.cat.update(x)
        self.log("tm/sum", self.sum, **common)
        self.log("tm/mean", self.mean, **common)
        self.log("tm/max", self.largest, **common)
        self.seen += n
        self.assigned = self.assigned + n
        return self.net(x).mean()

    def on_train_epoch_end(self) -> None:
        self.log("tm/cat", float(self.cat.compute().numel()))
        self.cat.reset()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def logged(
    policy: Any, workers: int, n: int, size: int, **options: Any
) -> tuple[dict[str, float], pl.Trainer]:
    """What one run has logged at the end of its epoch, and its trainer."""
    x = torch.arange(1.0, n + 1).unsqueeze(1)
    trainer = make_trainer(HybridStrategy(policy=policy), workers, max_epochs=1, **options)
    pl.seed_everything(7, verbose=False)
    trainer.fit(Counting(), DataLoader(TensorDataset(x), size, shuffle=True))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, trainer


def check(policy: Any, workers: int, n: int, size: int) -> None:
    found, trainer = logged(policy, workers, n, size)
    assert found.pop("mean") == pytest.approx((n + 1) / 2, rel=1e-5)
    assert found.pop("tm/mean") == pytest.approx((n + 1) / 2, rel=1e-5)
    assert found.pop("max") == found.pop("tm/max") == n
    assert set(found.values()) == {n}, found
    assert trainer.strategy.run_stats()["samples"] == n


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("policy", "workers", "n", "size"),
    [("hybrid", 2, 97, 12), ("hybrid", 3, 97, 8), ("async", 2, 3, 8), ("backup", 3, 97, 4)],
)
def test_an_epoch_logs_what_one_process_would(policy: Any, workers: int, n: int, size: int) -> None:
    check(policy, workers, n, size)


# Every run starts processes, so there are few here; all policies and more sizes are slow.
@settings(max_examples=4, deadline=None, derandomize=True, database=None)
@example(policy="hybrid", workers=4, size=2, part=0.01)
@given(
    st.sampled_from(["hybrid", "async", "backup", "k_batch_sync"]),
    st.integers(1, 4),
    st.integers(1, 4),
    st.floats(0, 1),
)
def test_any_number_of_samples_is_logged_once(
    policy: Any, workers: int, size: int, part: float
) -> None:
    check(policy, workers, 1 + int(part * (3 * workers * size - 1)), size)


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("policy", EVERY_POLICY, ids=str)
def test_any_number_of_samples_is_logged_once_under_every_policy(policy: Any) -> None:
    @settings(
        max_examples=25,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(1, 4), st.integers(1, 5), st.floats(0, 1))
    def whatever(workers: int, size: int, part: float) -> None:
        check(policy, workers, 1 + int(part * (3 * workers * size - 1)), size)

    whatever()


# ---- a worker that has nothing in the last step --------------------------------------------------


class Hooks(Callback):
    """Counts, in memory that all processes share, what is run for mini-batches."""

    def __init__(self) -> None:
        self.counts = torch.zeros(4, dtype=torch.int64).share_memory_()

    def on_train_batch_start(self, *_: Any) -> None:
        self.counts[0] += 1

    def on_before_zero_grad(self, *_: Any) -> None:
        self.counts[1] += 1

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.counts[2] += 1

    def on_train_batch_end(self, *_: Any) -> None:
        self.counts[3] += 1


class Everything(Regression):
    """Reduces in every way within a step, normalises, and looks at the mean of all gradients."""

    def __init__(self) -> None:
        super().__init__(lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), self.halve)
        self.norm = torch.nn.BatchNorm1d(4)
        self.count = torchmetrics.SumMetric()

    @staticmethod
    def halve(optimizer: Any) -> Any:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        return {"scheduler": schedule, "interval": "step"}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.net(self.norm(x)), y)
        n = float(len(x))
        self.log("n", n, on_step=True, on_epoch=True, sync_dist=True, reduce_fx="sum")
        self.count(n)
        self.log("count", self.count, on_step=True, on_epoch=True)
        gathered = self.all_gather(torch.tensor(n))
        self.log("gathered", gathered.sum(), on_step=False, on_epoch=True, reduce_fx="sum")
        return loss


def fitted(workers: int, n: int, size: int, module: pl.LightningModule, **options: Any) -> Any:
    pl.seed_everything(7, verbose=False)
    trainer = make_trainer("hybrid", workers, **options)
    training = DataLoader(regression_data(n, torch.float64), size, shuffle=True)
    trainer.fit(module.double(), training, DataLoader(regression_data(8, torch.float64), 4))
    return trainer


@pytest.mark.few(1)
@pytest.mark.parametrize("accumulate", by_default([1, 2, 3], 1, 2))
@pytest.mark.parametrize("n", by_default([14, 20], 14))
def test_a_worker_without_a_mini_batch_in_the_last_step_changes_no_result(
    n: int, accumulate: int
) -> None:
    options: dict[str, Any] = {
        "max_epochs": 2,
        "sync_batchnorm": True,
        "accumulate_grad_batches": accumulate,
        "val_check_interval": 2,
        "gradient_clip_val": 0.5,
    }
    one, three = Everything(), Everything()
    three.load_state_dict(one.state_dict())
    alone = fitted(1, n, 6, one, **options)
    trainer = fitted(3, n, 2, three, **options)
    assert trainer.global_step == alone.global_step
    assert distance(one, three) < 1e-9
    assert torch.allclose(one.norm.running_var, three.norm.running_var)
    for name in ("n_epoch", "count_epoch", "gathered"):
        assert trainer.callback_metrics[name] == alone.callback_metrics[name] == n, name
    for name in ("n_step", "val/loss"):
        assert trainer.callback_metrics[name] == pytest.approx(
            float(alone.callback_metrics[name])
        ), name


def test_hooks_and_data_are_not_asked_for_what_does_not_count() -> None:
    hooks, data = Hooks(), Recorder(regression_data(13))
    trainer = make_trainer("hybrid", 3, max_epochs=2, callbacks=[hooks])
    trainer.fit(Regression(), DataLoader(data, 2, shuffle=True))
    assert data.counts.tolist() == [2] * 13
    assert hooks.counts.tolist() == [2 * (2 * 3 + 1)] * 4
    assert trainer.global_step == 6


class Saves(Callback):
    """Asks all workers something at the end of each mini-batch."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        assert trainer.strategy.reduce_boolean_decision(True)
        if trainer.global_step == 6:
            trainer.should_stop = True


def test_decisions_of_the_other_workers_in_their_last_step_hold_for_all(tmp_path: Any) -> None:
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1, monitor="train/loss")
    trainer = make_trainer(
        "hybrid", 3, max_epochs=5, callbacks=[Saves(), saving], enable_checkpointing=True
    )
    trainer.fit(Regression(), DataLoader(regression_data(13), 2, shuffle=True))
    assert trainer.global_step == 6 and trainer.current_epoch == 2
    assert len(list(tmp_path.iterdir())) == 2


class Two(Regression):
    """Two optimizers, stepped by the user."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        halves = self.net[0].parameters(), self.net[2].parameters()
        return [torch.optim.Adam(half, lr=0.01) for half in halves]


def test_a_worker_that_steps_by_hand_may_sit_out_any_number_of_steps() -> None:
    one, three = Two(), Two()
    three.load_state_dict(one.state_dict())
    alone = fitted(1, 13, 6, one, max_epochs=2)
    trainer = fitted(3, 13, 2, three, max_epochs=2)
    assert trainer.global_step == alone.global_step == 12
    assert distance(one, three) < 1e-9


# ---- a contribution that comes too late ----------------------------------------------------------


class Slow(Callback):
    """Makes worker 1 late, so that its contributions are dropped; counts mini-batches that end."""

    def __init__(self) -> None:
        self.ended = torch.zeros(3, dtype=torch.int64).share_memory_()

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1:
            time.sleep(0.02)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.ended[trainer.global_rank] += 1


class Keeps(Counting):
    """Says in the end how many samples the first worker's buffer has seen."""

    def on_train_end(self) -> None:
        stats = self.trainer.strategy.client.stats()
        worker = self.trainer.global_rank
        assert float(self.seen) == stats["samples_per_worker"][worker] == float(self.assigned)


def test_a_late_contribution_leaves_no_trace() -> None:
    slow = Slow()
    trainer = make_trainer(HybridStrategy(policy="backup"), 3, max_epochs=2, callbacks=[slow])
    x = torch.arange(1.0, 98).unsqueeze(1)
    trainer.fit(Keeps(), DataLoader(TensorDataset(x), 4, shuffle=True))
    stats = trainer.strategy.run_stats()
    assert sum(stats["dropped"]) > 0 and stats["samples"] == 2 * 97
    assert trainer.callback_metrics["samples"] == trainer.callback_metrics["tm/sum"] == 97
    assert slow.ended.sum() == 2 * 25


# ---- what comes behind the last step ------------------------------------------------------------

QUICK = ("async", "k_batch_async", "hogwild")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "policy",
    [p if p in QUICK else pytest.param(p, marks=pytest.mark.slow) for p in EVERY_POLICY],
    ids=str,
)
def test_max_steps_is_exact_and_what_is_logged_is_what_counted(policy: Any) -> None:
    for last in (1, 5, 17) if policy not in QUICK else (5,):
        trainer = make_trainer(HybridStrategy(policy=policy), 2, max_epochs=-1, max_steps=last)
        x = torch.arange(1.0, 97).unsqueeze(1)
        trainer.fit(Counting(), DataLoader(TensorDataset(x), 8, shuffle=True))
        stats = trainer.strategy.run_stats()
        assert trainer.global_step == stats["updates"] == last
        if last < 6:  # all in one epoch
            assert trainer.callback_metrics["samples"] == stats["samples"]
            assert trainer.callback_metrics["tm/sum"] == stats["samples"]


class Skips(Regression):
    """Returns nothing for the first mini-batch that is accumulated."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 0 else super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        assert self.trainer.world_size == 2


def test_hooks_see_all_workers_behind_a_step_that_returns_nothing() -> None:
    trainer = make_trainer("hybrid", 2, max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(Skips(), DataLoader(regression_data(16), 4))
