"""Numerics, proven by equality: hybrid is one worker with a G-times larger mini-batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

from tests.lightning.toys import Regression, distance, fit, flat, regression_data
from tests.picking import by_default

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.02),
    "nesterov": partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05),
}


@pytest.mark.parametrize("name", by_default(OPTIMIZERS, "adam"))
def test_hybrid_equals_one_worker_with_a_g_times_larger_batch(name: str) -> None:
    module = partial(Regression, OPTIMIZERS[name])
    whole, _ = fit("hybrid", 1, 12, module)
    for workers in (2, 3, 4):
        shared, trainer = fit("hybrid", workers, 12 // workers, module)
        assert trainer.global_step == 12
        assert distance(shared, whole) < 1e-6


@pytest.mark.slow
def test_in_float64_the_equality_holds_over_a_hundred_steps() -> None:
    module = partial(Regression, OPTIMIZERS["adam"])
    data = regression_data(48, torch.float64)
    options: dict[str, Any] = {"max_epochs": 25, "precision": "64-true"}
    whole, _ = fit("hybrid", 1, 12, module, data, **options)
    shared, _ = fit("hybrid", 3, 4, module, data, **options)
    assert next(shared.parameters()).dtype == torch.float64  # in this process, too
    assert 0 < distance(shared, whole) < 1e-11


def test_hybrid_equals_plain_single_device_training_on_the_same_order() -> None:
    data = regression_data(12)  # one full batch, so the order does not matter
    plain, _ = fit("auto", 1, 12, Regression, data, max_epochs=20)
    shared, _ = fit("hybrid", 2, 6, Regression, data, max_epochs=20)
    assert distance(shared, plain) < 1e-6


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_hybrid_equals_ddp(name: str) -> None:
    module = partial(Regression, OPTIMIZERS[name])
    theirs, _ = fit("ddp_fork", 2, 6, module)
    ours, _ = fit("hybrid", 2, 6, module)
    assert distance(ours, theirs) < 1e-6


@pytest.mark.parametrize("workers", by_default([2, 3], 3))
def test_two_runs_give_the_same_bits(workers: int) -> None:
    module = partial(Regression, OPTIMIZERS["adam"])
    first, _ = fit("hybrid", workers, 4, module)
    second, _ = fit("hybrid", workers, 4, module)
    assert torch.equal(flat(first), flat(second))


@pytest.mark.parametrize("n", by_default([1, 2, 5, 37], 37, 2))
def test_a_remainder_is_weighted_by_samples(n: int) -> None:
    data = regression_data(n)
    whole, _ = fit("hybrid", 1, 12, Regression, data)
    shared, trainer = fit("hybrid", 3, 4, Regression, data)
    assert distance(shared, whole) < 1e-6
    assert trainer.strategy.run_stats()["samples"] == 3 * n


@pytest.mark.wide
@pytest.mark.parametrize("algorithm", by_default(["norm", "value"], "norm"))
def test_clipping_sees_the_merged_gradient(algorithm: str) -> None:
    options: dict[str, Any] = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm}
    for optimizer in (OPTIMIZERS["nesterov"], OPTIMIZERS["adam"]):
        module = partial(Regression, optimizer)
        whole, _ = fit("hybrid", 1, 12, module, **options)
        single, _ = fit("auto", 1, 48, module, regression_data(48), **options)
        full, _ = fit("hybrid", 2, 24, module, regression_data(48), **options)
        shared, _ = fit("hybrid", 2, 6, module, **options)
        free, _ = fit("hybrid", 2, 6, module)
        assert distance(shared, whole) < 1e-6
        assert distance(full, single) < 1e-6  # a full batch: order does not matter
        assert distance(shared, free) > 1e-4  # it did clip


@pytest.mark.parametrize("accumulate", by_default([2, 3], 3))
def test_accumulated_batches_equal_ddp(accumulate: int) -> None:
    theirs, _ = fit("ddp_fork", 2, 6, accumulate_grad_batches=accumulate)
    ours, _ = fit("hybrid", 2, 6, accumulate_grad_batches=accumulate)
    assert distance(ours, theirs) < 1e-6


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: {"scheduler": OneCycleLR(o, 0.05, total_steps=13), "interval": "step"},
        lambda o: {"scheduler": StepLR(o, 1, 0.5), "interval": "epoch"},
        lambda o: {"scheduler": ReduceLROnPlateau(o, patience=0), "monitor": "train/loss"},
    ],
)
def test_schedules_act_on_the_server(schedule: Any) -> None:
    module = partial(Regression, OPTIMIZERS["nesterov"], schedule)
    theirs, _ = fit("ddp_fork", 2, 6, module)
    ours, _ = fit("hybrid", 2, 6, module)
    assert distance(ours, theirs) < 1e-6


class TwoGroups(Regression):
    """Other hyper-parameters for each layer, one layer frozen, one parameter never used."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Parameter(torch.ones(3))
        self.net[0].bias.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(
            [
                {"params": [self.net[0].weight], "lr": 0.02, "weight_decay": 0.1},
                {"params": [*self.net[2].parameters(), self.unused], "betas": (0.8, 0.9)},
            ],
            lr=0.005,
        )


def test_groups_with_frozen_and_unused_parameters_equal_one_worker_and_ddp() -> None:
    whole, _ = fit("hybrid", 1, 12, TwoGroups)
    shared, _ = fit("hybrid", 2, 6, TwoGroups)
    ddp = DDPStrategy(start_method="fork", find_unused_parameters=True)
    theirs, _ = fit(ddp, 2, 24, TwoGroups, regression_data(48))
    ours, _ = fit("hybrid", 2, 24, TwoGroups, regression_data(48))
    assert distance(shared, whole) < 1e-6
    assert distance(ours, theirs) < 1e-6
    assert torch.equal(shared.unused, torch.ones(3))


class Gan(pl.LightningModule):
    """Manual optimization: two optimizers that take turns, each with its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = torch.nn.Linear(2, 4)
        self.critic = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        one, two = self.optimizers()
        self.toggle_optimizer(one)
        self.manual_backward(self.critic(self.generator(batch[0][:, :2])).mean())
        one.step()
        one.zero_grad()
        self.untoggle_optimizer(one)
        fake = self.generator(batch[0][:, :2]).detach()
        loss = (self.critic(fake) - self.critic(batch[0])).pow(2).mean()
        self.manual_backward(loss)
        two.step()
        two.zero_grad()

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.Adam(self.generator.parameters(), lr=0.01),
            torch.optim.SGD(self.critic.parameters(), lr=0.01, momentum=0.5),
        )


def test_manual_optimization_with_two_optimizers_equals_one_worker() -> None:
    whole, _ = fit("hybrid", 1, 12, Gan)
    shared, trainer = fit("hybrid", 3, 4, Gan)
    assert distance(shared, whole) < 1e-6
    assert trainer.global_step == 24


def test_a_hook_that_changes_gradients_is_respected() -> None:
    class Halved(Regression):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for parameter in self.parameters():
                parameter.grad.mul_(0.5)

    half_rate = partial(Regression, partial(torch.optim.SGD, lr=0.01))
    hooked, _ = fit("hybrid", 2, 6, partial(Halved, partial(torch.optim.SGD, lr=0.02)))
    plain, _ = fit("hybrid", 2, 6, half_rate)
    assert distance(hooked, plain) < 1e-6


@pytest.mark.slow
def test_spawned_workers_give_the_same_bits_as_forked_ones() -> None:
    from hybridtrain import HybridStrategy
    from tests.lightning.spawnable import SpawnRegression

    forked, _ = fit(HybridStrategy(start_method="fork"), 2, 6, SpawnRegression)
    spawned, _ = fit(HybridStrategy(start_method="spawn"), 2, 6, SpawnRegression)
    assert torch.equal(flat(forked), flat(spawned))


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", by_default([2, 3], 3))
@pytest.mark.parametrize("n", by_default([45, 41, 37], 37))
@pytest.mark.parametrize("looks", [False, True])
def test_accumulated_batches_of_uneven_shares_equal_one_worker_that_sees_the_union(
    looks: bool, n: int, workers: int
) -> None:
    """One process weighs the mini-batches of a window alike, however few samples the last has."""

    class Looking(Regression):
        def on_after_backward(self) -> None:
            self.seen = self.net[0].weight.grad.norm()

    data, module = regression_data(n, torch.float64), Looking if looks else Regression
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "precision": "64-true"}
    one, _ = fit("hybrid", 1, 12, module, data, **options)
    many, trainer = fit("hybrid", workers, 12 // workers, module, data, **options)
    assert distance(one, many) < 1e-12
    assert trainer.strategy.run_stats()["samples"] == 3 * n
