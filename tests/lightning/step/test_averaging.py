"""Who looks at gradients sees the mean of all workers, as under all-reduce; None abstains."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from tests.lightning.toys import Regression, distance, fit, flat, regression_data
from tests.picking import by_default

NESTEROV = partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True)


class Looking(Regression):
    """Writes the gradients that each hook sees, rank by rank."""

    def __init__(self, folder: Path) -> None:
        super().__init__(NESTEROV)
        self.folder = folder
        self.seen: list[torch.Tensor] = []

    def look(self) -> None:
        self.seen.append(torch.cat([p.grad.flatten() for p in self.parameters()]))

    def on_after_backward(self) -> None:
        self.look()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.look()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.seen:
            self.look()

    def on_train_end(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        torch.save(torch.stack(self.seen), self.folder / f"{self.global_rank}.pt")


def seen(folder: Path) -> list[torch.Tensor]:
    """What each rank has seen, (looks, P)."""
    return [torch.load(path) for path in sorted(folder.iterdir())]


@pytest.mark.parametrize("accumulate", by_default([1, 2], 2))
def test_hooks_see_the_averaged_gradient_as_under_ddp(accumulate: int, tmp_path: Path) -> None:
    for strategy in ("hybrid", "ddp_fork"):
        module = partial(Looking, tmp_path / strategy)
        fit(strategy, 2, 6, module, max_epochs=2, accumulate_grad_batches=accumulate)
    ours, theirs = seen(tmp_path / "hybrid"), seen(tmp_path / "ddp_fork")
    assert len(ours) == len(theirs) == 2
    if accumulate == 1:  # else some looks come before the ranks have exchanged anything
        assert torch.equal(ours[0], ours[1])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_an_overridden_clipping_acts_on_the_mean() -> None:
    class Own(Regression):
        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            self.clip_gradients(optimizer, 0.05, "norm")
            for parameter in self.parameters():
                parameter.grad.clamp_(-0.01, 0.01)

    module = partial(Own, NESTEROV)
    whole, _ = fit("hybrid", 1, 12, module)
    shared, trainer = fit("hybrid", 3, 4, module)
    theirs, _ = fit("ddp_fork", 3, 4, module)
    assert distance(shared, whole) < 1e-6
    assert distance(shared, theirs) < 1e-6
    assert trainer.strategy.run_stats()["samples"] == 144


def test_clipping_by_hand_in_manual_optimization_acts_on_the_mean() -> None:
    class Manual(Regression):
        def __init__(self) -> None:
            super().__init__(NESTEROV)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)
            optimizer.step()

    whole, _ = fit("hybrid", 1, 12, Manual)
    shared, _ = fit("hybrid", 2, 6, Manual)
    assert distance(shared, whole) < 1e-6


class ByHand(Regression):
    """Makes gradients in several ways, under manual optimization, and clips their mean."""

    def __init__(self, how: str) -> None:
        super().__init__(NESTEROV)
        self.automatic_optimization, self.how = False, how

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, parameters = self.optimizers(), list(self.parameters())
        loss = super().training_step(batch, batch_idx)
        for _ in range(1 + self.global_rank if self.how == "probed" else 0):
            super().training_step(batch, batch_idx).backward()  # how often is the worker's matter
        if self.how in ("manual_backward", "probed"):
            optimizer.zero_grad()
            self.manual_backward(loss)
        elif self.how == "backward":
            optimizer.zero_grad()
            loss.backward()
        else:
            for parameter, gradient in zip(
                parameters, torch.autograd.grad(loss, parameters), strict=True
            ):
                if self.how == "copied" and parameter.grad is not None:
                    parameter.grad.copy_(gradient)
                else:
                    parameter.grad = gradient
        self.clip_gradients(optimizer, 0.05, "norm")
        optimizer.step()


@pytest.mark.parametrize("how", ["manual_backward", "probed", "backward", "set", "copied"])
def test_gradients_made_by_hand_are_averaged_however_they_are_made(how: str) -> None:
    whole, _ = fit("hybrid", 1, 12, lambda: ByHand(how))
    shared, _ = fit("hybrid", 3, 4, lambda: ByHand(how))
    assert distance(shared, whole) < 1e-6


@pytest.mark.parametrize("n", [5, 37])
def test_a_remainder_is_weighted_in_the_average_too(n: int, tmp_path: Path) -> None:
    data = regression_data(n)
    whole, _ = fit("hybrid", 1, 12, partial(Looking, tmp_path / "1"), data)
    shared, _ = fit("hybrid", 3, 4, partial(Looking, tmp_path / "3"), data)
    assert distance(shared, whole) < 1e-6


def test_hooks_of_the_optimizer_run_around_the_step(tmp_path: Path) -> None:
    class Hooked(Regression):
        def configure_optimizers(self) -> Any:
            optimizer = NESTEROV(self.parameters())
            told: list[float] = []
            optimizer.register_step_pre_hook(lambda *_: told.append(float(flat(self).sum())))
            optimizer.register_step_post_hook(lambda *_: told.append(float(flat(self).sum())))
            self.told = told
            return optimizer

        def on_train_end(self) -> None:
            torch.save(torch.tensor(self.told), tmp_path / f"{self.global_rank}.pt")

    hooked, _ = fit("hybrid", 2, 6, Hooked, max_epochs=2)
    plain, _ = fit("hybrid", 2, 6, partial(Regression, NESTEROV), max_epochs=2)
    assert distance(hooked, plain) == 0.0
    told = torch.load(tmp_path / "0.pt").view(8, 2)  # steps × (before, after)
    assert torch.equal(told[1:, 0], told[:-1, 1])
    assert bool((told[:, 0] != told[:, 1]).all())


class Sometimes(Regression):
    """Some workers, and in one step all of them, have nothing to say."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if (self.global_rank + batch_idx) % 2 == 0 or batch_idx == 3 else loss


class SometimesLooking(Sometimes):
    def on_after_backward(self) -> None:
        assert all(p.grad is not None for p in self.parameters())


@pytest.mark.few(2)
@pytest.mark.parametrize("module", [Sometimes, SometimesLooking])
@pytest.mark.parametrize("strategy", ["hybrid", "async"])
def test_trap_18_a_training_step_that_returns_none_abstains(strategy: str, module: Any) -> None:
    trained, trainer = fit(strategy, 2, 6, module, max_epochs=2)
    assert trainer.world_size == 2
    assert not torch.equal(flat(trained), flat(fresh()))


def fresh() -> pl.LightningModule:
    """As ``fit`` makes it, untrained."""
    pl.seed_everything(7, verbose=False)
    return Regression()


class EverySecond(Regression):
    """The mini-batch that ends each window of accumulation has nothing to say."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 2 else loss


class EverySecondLooking(EverySecond):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert all(p.grad is not None for p in self.parameters())


@pytest.mark.parametrize("module", [EverySecond, EverySecondLooking])
def test_what_was_accumulated_before_an_abstention_still_counts(module: Any) -> None:
    options: dict[str, Any] = {"overfit_batches": 1.0, "accumulate_grad_batches": 2}
    alone, _ = fit("auto", 1, 12, module, **options)  # both in order, not shuffled
    shared, trainer = fit("hybrid", 2, 6, module, **options)
    assert trainer.global_step == 6
    assert distance(shared, alone) < 1e-6
    assert distance(shared, fresh()) > 1e-4


def test_an_abstaining_worker_has_no_part_in_the_mean() -> None:
    class OnlyRankOne(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss if self.global_rank == 1 or self.trainer.world_size == 1 else None

    class Half(torch.utils.data.Dataset[Any]):
        """What rank 1 of 2 sees of the whole set, taken in order."""

        def __init__(self) -> None:
            self.data = regression_data(12)

        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            return self.data[2 * index + 1]

    options: dict[str, Any] = {"overfit_batches": 1.0, "max_epochs": 4}  # in order, not shuffled
    shared, _ = fit("hybrid", 2, 6, OnlyRankOne, regression_data(12), **options)
    alone, _ = fit("hybrid", 1, 6, Regression, Half(), **options)
    assert distance(shared, alone) < 1e-6


class Wide(pl.LightningModule):
    """Has a gradient that is copied as soon as autograd has made it."""

    def __init__(self, rate: float, halves: bool) -> None:
        super().__init__()
        self.net, self.rate, self.halves = torch.nn.Linear(4, 20_000), rate, halves

    def on_fit_start(self) -> None:
        def halve(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

        for parameter in self.parameters() if self.halves else ():
            parameter.register_post_accumulate_grad_hook(halve)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.net(batch[0]).mean(1, keepdim=True) - batch[1]).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


def test_a_hook_of_autograd_that_changes_a_large_gradient_is_respected() -> None:
    hooked, _ = fit("hybrid", 2, 6, partial(Wide, 0.5, halves=True))
    plain, _ = fit("hybrid", 2, 6, partial(Wide, 0.25, halves=False))
    assert distance(hooked, plain) < 1e-6
    assert distance(hooked, Wide(0.5, halves=False)) > 1e-4
