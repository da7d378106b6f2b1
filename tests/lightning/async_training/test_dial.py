"""The dial from lock-step to free-running, in real processes: policies that equal one another."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from hybridtrain import HybridStrategy
from hybridtrain.engine.policies import (
    BoundedStaleness,
    FirstK,
    RoundRobin,
    Softsync,
    Switch,
    make_policy,
)
from tests.lightning.toys import Recorder, Regression, distance, fit, flat, regression_data
from tests.picking import by_default

SGD = partial(torch.optim.SGD, lr=0.02)
ADAM = partial(torch.optim.Adam, lr=0.01)


def by(policy: Any, **options: Any) -> HybridStrategy:
    return HybridStrategy(policy=policy, **options)


# ---- limits that are lock-step ------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", by_default([SGD, ADAM], ADAM))
@pytest.mark.parametrize(
    "policy",
    by_default(
        [
            {"name": "backup", "k": 3},
            {"name": "k_async", "k": 3},
            {"name": "ssp", "lead": 0},
            {"name": "pipe_sgd", "delay": 0},
            {"name": "switch", "then": {"name": "ssp", "lead": 0}, "at_update": 5},
        ],
        {"name": "backup", "k": 3},
        {"name": "switch", "then": {"name": "ssp", "lead": 0}, "at_update": 5},
    ),
    ids=lambda policy: policy["name"],
)
def test_at_its_limit_a_policy_gives_the_same_bits_as_hybrid(policy: Any, optimizer: Any) -> None:
    module = partial(Regression, optimizer)
    data = regression_data(50)  # not a multiple of anything
    hybrid, one = fit("hybrid", 3, 4, module, data)
    other, two = fit(by(policy), 3, 4, module, data)
    assert torch.equal(flat(other), flat(hybrid))
    assert one.global_step == two.global_step == 3 * 5


# ---- limits that are one worker -----------------------------------------------------------------


def decaying(optimizer: Any) -> Any:
    return {"scheduler": StepLR(optimizer, 4, 0.7), "interval": "step"}


@pytest.mark.parametrize("accumulate", by_default([1, 2], 2))
@pytest.mark.parametrize("workers", by_default([2, 3], 3))
def test_synchronous_equals_one_worker_to_the_bit(workers: int, accumulate: int) -> None:
    module = partial(Regression, ADAM, decaying)
    data = regression_data(53)
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate}
    alone, one = fit("hybrid", 1, 4, module, data, **options)
    turns, two = fit(by("synchronous"), workers, 4, module, data, **options)
    assert torch.equal(flat(turns), flat(alone))
    assert one.global_step == two.global_step
    stats: Any = two.strategy.run_stats()
    assert stats["staleness"]["max"] == 0
    assert stats["samples"] == 3 * 53
    assert sum(samples > 0 for samples in stats["samples_per_worker"]) == workers


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "policy",
    by_default(
        [
            "async",
            "synchronous",
            "backup",
            "k_async",
            "ssp",
            "softsync",
            {"name": "backup", "k": "auto"},
        ],
        "async",
        "ssp",
        {"name": "backup", "k": "auto"},
    ),
    ids=str,
)
def test_with_one_worker_every_policy_is_plain_training(policy: Any) -> None:
    module = partial(Regression, ADAM, decaying)
    plain, one = fit("hybrid", 1, 4, module)
    alone, two = fit(by(policy), 1, 4, module)
    assert torch.equal(flat(alone), flat(plain))
    assert one.global_step == two.global_step


@pytest.mark.parametrize("optimizer", [SGD, ADAM])
def test_two_mini_batches_held_for_one_update_are_two_accumulated(optimizer: Any) -> None:
    module = partial(Regression, optimizer, decaying)
    data = regression_data(48, torch.float64)
    options: dict[str, Any] = {"precision": "64-true"}
    plain, one = fit("hybrid", 1, 4, module, data, accumulate_grad_batches=2, **options)
    held, two = fit(by({"name": "k_batch_async", "k": 2}), 1, 4, module, data, **options)
    assert distance(held, plain) < 1e-12
    assert one.global_step == two.global_step == 3 * 6
    stats: Any = two.strategy.run_stats()
    assert stats["effective_batch"] == 8


# ---- the example of the STT page ----------------------------------------------------------------


class Overlapping(Regression):
    """Both workers have read the parameters before either pushes."""

    def __init__(self) -> None:
        super().__init__(SGD)
        self.both = multiprocessing.get_context("fork").Barrier(2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.both.wait(30)
        loss = super().training_step(batch, batch_idx)
        self.both.wait(30)
        return loss


def test_two_overlapping_mini_batches_add_what_each_computed_at_the_same_parameters() -> None:
    """W + dW_n(W) + dW_n+1(W): mozilla/DeepSpeech, ParallelOptimization.rst, "Asynchronous"."""
    data = regression_data(8, torch.float64)
    options: dict[str, Any] = {"precision": "64-true", "max_epochs": 1}
    trained, trainer = fit(by("async", start_method="fork"), 2, 4, Overlapping, data, **options)
    assert trainer.global_step == 2
    pl.seed_everything(7, verbose=False)
    start = Regression(SGD).double()
    order = torch.randperm(8, generator=torch.Generator().manual_seed(7)).tolist()
    increments = []
    for batch in (order[:4], order[4:]):
        x, y = data[batch]
        loss = torch.nn.functional.mse_loss(start.net(x), y)
        gradients = torch.autograd.grad(loss, list(start.parameters()))
        increments.append(-0.02 * torch.cat([g.flatten() for g in gradients]))
    expected = flat(start) + increments[0] + increments[1]
    torch.testing.assert_close(flat(trained), expected, rtol=0, atol=1e-15)
    assert trainer.strategy.run_stats()["staleness"]["max"] == 1  # type: ignore[attr-defined]


# ---- nothing is lost, nothing counts twice ------------------------------------------------------

N = 60


class Tally(pl.LightningModule):
    """One weight per sample: how much of it has been applied. Some workers are slow."""

    def __init__(self, delays_s: dict[int, float]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(N))
        self.delays_s = delays_s

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(self.delays_s.get(self.global_rank, 0.002))
        return (batch[0] @ self.weight).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


POLICIES: dict[str, Callable[[], Any]] = {
    "synchronous": RoundRobin,
    "hybrid": lambda: make_policy("hybrid"),
    "backup": FirstK,
    "backup in time": lambda: make_policy({"name": "backup", "k": "auto"}),
    "k_async": lambda: FirstK(2, "use"),
    "k_batch_sync": lambda: FirstK(2, "drop", True),
    "k_batch_async": lambda: FirstK(2, "use", True),
    "softsync": lambda: Softsync(1),
    "ssp": lambda: BoundedStaleness(1),
    "async": lambda: make_policy("async"),
    "switch": lambda: Switch(make_policy("hybrid"), make_policy("async"), at_update=6),
    "switch back": lambda: Switch(make_policy("async"), make_policy("hybrid"), at_update=6),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("accumulate", by_default([1, 2], 2))
@pytest.mark.parametrize("name", by_default(POLICIES, *[*POLICIES][::2]))
def test_updates_are_conserved_and_every_sample_counts_once_an_epoch(
    name: str, accumulate: int
) -> None:
    data = TensorDataset(torch.eye(N, dtype=torch.float64))
    module = partial(Tally, {0: 0.02})
    options: dict[str, Any] = {"precision": "64-true", "accumulate_grad_batches": accumulate}
    strategy = by(POLICIES[name]())
    trained, trainer = fit(strategy, 3, 4, module, data, max_epochs=2, **options)
    stats = strategy.run_stats()
    applied = -flat(trained)
    assert float(applied.min()) > 0, "every sample has counted"
    if accumulate == 1:  # else Lightning weighs the last, shorter window of a worker less
        assert float(applied.sum()) == pytest.approx(stats["updates"], abs=1e-9), "shares sum to 1"
    assert stats["samples"] == 2 * N, "and only once an epoch"
    assert trainer.global_step == stats["updates"]


def test_backup_drops_the_late_and_their_samples_are_done_by_others() -> None:
    data = TensorDataset(torch.eye(N, dtype=torch.float64))
    strategy = by({"name": "backup", "k": 2})
    fit(strategy, 3, 2, partial(Tally, {0: 0.05}), data, max_epochs=1, precision="64-true")
    stats = strategy.run_stats()
    assert stats["dropped"][0] > 0
    assert stats["samples"] == N
    assert stats["samples_per_worker"][0] < N / 3


class Manual(Regression):
    """The same, step by step."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


@pytest.mark.parametrize("module", [Regression, Manual])
def test_a_loss_that_has_stopped_falling_switches(module: Any) -> None:
    pushes = 3 * 48 // 4
    for min_delta, switches in ((0.0, False), (1e9, True)):
        policy = {"name": "switch", "patience": 6, "min_delta": min_delta}
        if not switches:
            policy["patience"] = pushes  # one mean only, and nothing to compare it with
        strategy = by(policy)
        fit(strategy, 2, 4, module)
        updates = strategy.run_stats()["updates"]
        # The first mean is better than none, the second is not better by so much.
        assert updates == (6 + (pushes - 12) if switches else pushes // 2)


class Rated(Regression):
    """Remembers the learning rate that it ended with."""

    def __init__(self) -> None:
        super().__init__(SGD, decaying)
        self.register_buffer("rate", torch.zeros(()))

    def on_train_end(self) -> None:
        self.rate.fill_(self.optimizers().param_groups[0]["lr"])


def test_schedules_in_steps_count_updates_whatever_is_held_or_dropped() -> None:
    rates = []
    for policy in ("hybrid", {"name": "k_batch_async", "k": 2}, {"name": "backup", "k": 1}):
        strategy = by(policy)
        module, trainer = fit(strategy, 2, 3, Rated, max_epochs=2)
        updates = strategy.run_stats()["updates"]
        assert trainer.global_step == updates
        rates.append(float(module.rate) / 0.7 ** (updates // 4))
    assert rates == pytest.approx([0.02] * 3)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", by_default(POLICIES, "hybrid", "backup in time", "k_batch_async"))
def test_a_run_that_goes_on_in_mid_epoch_does_what_is_left_and_nothing_twice(
    name: str, tmp_path: Path
) -> None:
    data = TensorDataset(torch.eye(N, dtype=torch.float64))
    module = partial(Tally, {0: 0.01})
    options: dict[str, Any] = {"precision": "64-true", "default_root_dir": tmp_path / "root"}
    options["enable_checkpointing"] = True
    saving = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=1)
    fit(by(POLICIES[name]()), 3, 4, module, data, max_steps=3, callbacks=[saving], **options)
    begun = torch.load(tmp_path / "last.ckpt", weights_only=True)
    done = -begun["state_dict"]["weight"]
    assert begun["global_step"] >= 1 and 0 < int((done > 0).sum()) < N, "in the midst of the epoch"
    ended, trainer = fit(
        by("async"), 2, 4, module, data, str(tmp_path / "last.ckpt"), max_epochs=1, **options
    )
    applied = -flat(ended)
    rounding = 1e-7  # Lightning restores into float32 before it makes the module double
    torch.testing.assert_close(applied[done > 0], done[done > 0], rtol=rounding, atol=0)
    assert torch.equal(applied[done == 0], torch.full_like(applied[done == 0], 0.25)), "all else"
    assert trainer.global_step == begun["global_step"] + int((done == 0).sum()) // 4


@pytest.mark.parametrize(
    "policy",
    ["async", *(pytest.param(p, marks=pytest.mark.slow) for p in ("ssp", "k_async", "hogwild"))],
)
@pytest.mark.parametrize("limit", [3, pytest.param(9, marks=pytest.mark.slow)])
def test_a_limit_in_mini_batches_is_each_workers_as_in_lock_step(policy: str, limit: int) -> None:
    data = Recorder(regression_data())
    _, trainer = fit(policy, 2, 4, Regression, data, max_epochs=1, limit_train_batches=limit)
    done = min(2 * limit * 4, len(data))
    assert cast(Any, trainer.strategy).run_stats()["samples"] == int(data.counts.sum()) == done
    assert int(data.counts.max()) == 1
