"""Optimizers that evaluate their closure several times per step are driven from the server."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from hybridtrain.errors import UserError
from tests.lightning.checkpointing.test_checkpoints import saved
from tests.lightning.step.test_optimizers import compare
from tests.lightning.toys import Regression, distance, fit, flat, regression_data
from tests.picking import by_default

LBFGS = partial(torch.optim.LBFGS, lr=0.1, max_iter=6, history_size=5)
WOLFE = partial(LBFGS, lr=1.0, line_search_fn="strong_wolfe")
EXACT: dict[str, Any] = {"precision": "64-true", "data": regression_data(48, torch.float64)}


@pytest.mark.parametrize("workers", by_default([2, 3], 3))
@pytest.mark.parametrize("make", [LBFGS, WOLFE])
def test_lbfgs_equals_one_process_on_the_union(make: Any, workers: int, tmp_path: Path) -> None:
    compare(partial(Regression, make), tmp_path, 1e-8, workers, max_epochs=1, **EXACT)


def test_losses_are_weighted_by_samples_like_the_gradients(tmp_path: Path) -> None:
    options = EXACT | {"data": regression_data(17, torch.float64)}  # 12, then 3 and 2
    compare(partial(Regression, WOLFE), tmp_path, 1e-8, **options)


def test_a_step_of_several_evaluations_counts_once() -> None:
    _, trainer = fit("hybrid", 2, 6, partial(Regression, LBFGS))
    stats = trainer.strategy.run_stats()
    assert trainer.global_step == stats["updates"] == 12
    assert stats["samples"] == 3 * 48


# ---- with everything else -----------------------------------------------------------------------


class Looking(Regression):
    """Hooks that change gradients; they must see the mean of all."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad.clamp_(-0.2, 0.2)


def test_hooks_see_the_averaged_gradient_of_every_evaluation(tmp_path: Path) -> None:
    compare(partial(Looking, WOLFE), tmp_path, 1e-8, max_epochs=1, **EXACT)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_acts_on_every_evaluation(algorithm: str, tmp_path: Path) -> None:
    clip = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": algorithm}
    few = partial(LBFGS, max_iter=3)  # what is clipped is no gradient, and the history suffers
    compare(partial(Regression, few), tmp_path, 1e-8, max_epochs=1, **EXACT, **clip)


class Two(Regression):
    """L-BFGS beside Adam, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        one, two = self.optimizers()

        def closure() -> Any:
            one.zero_grad()
            loss = super(Two, self).training_step(batch, batch_idx)
            self.manual_backward(loss)
            return loss

        one.step(closure=closure)
        two.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        two.step()

    def configure_optimizers(self) -> Any:
        return WOLFE(self.net[0].parameters()), torch.optim.Adam(self.net[2].parameters(), lr=0.01)


def test_lbfgs_beside_another_optimizer_in_manual_optimization_equals_one_process(
    tmp_path: Path,
) -> None:
    compare(Two, tmp_path, 1e-8, max_epochs=1, **EXACT)


@pytest.mark.wide
def test_accumulation_does_what_it_does_in_one_process(tmp_path: Path) -> None:
    compare(partial(Regression, LBFGS), tmp_path, 1e-8, accumulate_grad_batches=2, **EXACT)


def test_lbfgs_resumes_to_the_bit_with_its_history(tmp_path: Path) -> None:
    module = partial(Regression, LBFGS)
    path = saved("hybrid", 2, 6, module, tmp_path)
    state = torch.load(path, weights_only=True)["optimizer_states"][0]["state"][0]
    assert len(state["old_dirs"]) == 5 and state["d"].shape == (97,)
    resumed, _ = fit("hybrid", 2, 6, module, ckpt_path=str(path), max_epochs=4)
    whole, _ = fit("hybrid", 2, 6, module, max_epochs=4)
    assert torch.equal(flat(resumed), flat(whole))


# ---- users' own ---------------------------------------------------------------------------------


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation (Foret et al. 2021): two evaluations, the second uphill."""

    def __init__(self, params: Any, evaluate_first: bool = True) -> None:
        super().__init__(params, {"lr": 0.02, "rho": 0.1})
        self.evaluate_first = evaluate_first

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        evaluate = torch.enable_grad()(closure)
        loss = evaluate() if self.evaluate_first else None
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            self.state[p]["uphill"] = p.grad * (self.param_groups[0]["rho"] / (norm + 1e-12))
            p.data.add_(self.state[p]["uphill"])
        self.zero_grad()
        evaluate()
        for p in parameters:
            p.data.sub_(self.state[p]["uphill"])
            p.data.sub_(p.grad, alpha=self.param_groups[0]["lr"])
        self.zero_grad()
        return loss


def test_a_users_class_may_evaluate_twice(tmp_path: Path) -> None:
    compare(partial(Regression, Sam), tmp_path, 1e-8, **EXACT)


class SamByHand(Regression):
    """As its authors use it: backward first, then ``step`` with a closure that clears nothing."""

    def __init__(self) -> None:
        super().__init__(partial(Sam, evaluate_first=False))
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        def closure() -> Any:
            loss = super(SamByHand, self).training_step(batch, batch_idx)
            self.manual_backward(loss)
            return loss

        closure()
        self.optimizers().step(closure=closure)
        self.optimizers().zero_grad()


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [1, 2])
def test_gradients_that_are_there_before_the_closure_count(workers: int, tmp_path: Path) -> None:
    compare(SamByHand, tmp_path, 1e-8, workers, **EXACT)


class Lookahead(torch.optim.Optimizer):
    """Moves before it evaluates at all (Nesterov's own formulation)."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        group = self.param_groups[0]
        for p in group["params"]:
            velocity = self.state[p].setdefault("velocity", torch.zeros_like(p))
            p.data.add_(velocity, alpha=group["momentum"])
        with torch.enable_grad():
            loss = closure()
        for p in group["params"]:
            self.state[p]["velocity"].mul_(group["momentum"]).sub_(p.grad, alpha=group["lr"])
            p.data.sub_(p.grad, alpha=group["lr"])
        return loss


def test_an_optimizer_that_moves_before_it_evaluates_gets_the_gradient_from_there(
    tmp_path: Path,
) -> None:
    compare(partial(Regression, Lookahead), tmp_path, 1e-8, **EXACT)


class TwoSteps(torch.optim.Optimizer):
    """Sharpness-aware minimisation as its best-known implementation has it: in two methods."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.02, "rho": 0.1, "momentum": 0.9})
        self.base = torch.optim.SGD(self.param_groups, lr=0.02, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad, alpha=0.1)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.data = self.state[p]["old"]
        self.base.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> Any:
        raise AssertionError("it is not called")


def test_an_optimizer_that_steps_by_methods_of_its_own_steps_in_every_worker_alike(
    tmp_path: Path,
) -> None:
    class ByMethods(Regression):
        def __init__(self) -> None:
            super().__init__(TwoSteps)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().first_step()
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().second_step()

    compare(ByMethods, tmp_path, 1e-8, **EXACT)


# ---- ends ---------------------------------------------------------------------------------------


def test_lbfgs_is_refused_where_workers_run_freely() -> None:
    with pytest.raises(UserError, match=r"LBFGS .* use strategy=hybrid, or Adam or SGD"):
        fit("async", 2, 6, partial(Regression, LBFGS))


class Failing(Regression):
    """Fails in the third evaluation of the second step, in one worker."""

    evaluations = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.evaluations += 1
        if self.global_rank == 1 and self.evaluations == 9:
            raise ZeroDivisionError("in the middle of a step")
        return super().training_step(batch, batch_idx)


def test_a_failure_in_the_middle_of_a_step_ends_the_run_and_saves_no_trial_point(
    tmp_path: Path,
) -> None:
    checkpoint = ModelCheckpoint(tmp_path, save_top_k=0)
    with pytest.raises(ZeroDivisionError):
        fit(
            "hybrid",
            2,
            6,
            partial(Failing, LBFGS),
            callbacks=[checkpoint],
            enable_checkpointing=True,
        )
    assert not list(tmp_path.iterdir())
    assert not [t for t in threading.enumerate() if t.name == "hybridtrain-step"]


def test_no_thread_outlives_a_run() -> None:
    module: pl.LightningModule
    module, _ = fit("hybrid", 2, 6, partial(Regression, LBFGS), max_epochs=1)
    assert distance(module, Regression()) > 0
    assert not [t for t in threading.enumerate() if t.name == "hybridtrain-step"]
