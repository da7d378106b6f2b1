"""Hogwild: workers write the shared parameters and the optimizer's state themselves."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.accelerators import CUDAAccelerator
from pytorch_lightning.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torch.utils.data import TensorDataset

from hybridtrain import HybridStrategy
from hybridtrain.engine.step.in_place import InPlaceOptimizer
from hybridtrain.errors import UserError
from hybridtrain.lightning.preflight.strategy_checks import check_lock_free
from tests.lightning.toys import Regression, distance, fit, flat, regression_data
from tests.picking import by_default
from tests.support.ends import first

Make = Callable[[Any], Any]
OPTIM = torch.optim


class Signs(torch.optim.Optimizer):
    """A user's own: steps by the sign of a mean that it makes anew at every step."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                mean = state.get("mean", parameter.clone() * 0.0)
                state["mean"] = 0.9 * mean + parameter.grad  # another tensor each time
                parameter.sub_(state["mean"].sign() * group["lr"] / math.sqrt(state["step"]))


class Count(pl.LightningModule):
    """Each sample's coordinate says how often it was trained on; killed between count and step."""

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self.counts = torch.nn.Parameter(torch.zeros(24))
        self.mark = mark

    def on_train_start(self) -> None:
        step, left = InPlaceOptimizer._step, [3]

        def stepping(*args: Any) -> None:
            left[0] -= 1
            if not left[0] and first(self.mark):
                os.kill(os.getpid(), signal.SIGKILL)
            step(*args)

        InPlaceOptimizer._step = stepping  # type: ignore[method-assign]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return -self.counts[batch[0]].mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


@pytest.mark.parametrize(("options", "dropped"), [({"max_steps": 99}, 1), ({}, 0)])
def test_a_step_that_a_lost_worker_has_not_made_is_made(
    options: dict[str, Any], dropped: int, tmp_path: Path
) -> None:
    """With ``max_steps`` a step is counted before it is made; else nobody has heard of it."""
    module, strategy = Count(tmp_path / "died"), HybridStrategy("hogwild", on_failure="restart")
    fit(strategy, 1, 4, module, TensorDataset(torch.arange(24)), max_epochs=2, **options)
    assert (tmp_path / "died").exists()
    assert module.counts.tolist() == [0.5] * 24
    stats = strategy.run_stats()
    assert stats["samples"] == 48 and stats["dropped"] == [dropped]


class KilledUntold(Count):
    """Killed when it has made some steps that the server has not heard of."""

    def on_train_start(self) -> None:
        """No step is broken off."""

    def on_train_batch_start(self, *_: Any) -> None:
        own = self.trainer.strategy.client.steps.maker
        if len(own.untold) == 5 and first(self.mark):
            self.end()

    def end(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class FailedUntold(KilledUntold):
    """Its code raises instead: the worker says so, and what it had not told of is known then."""

    def end(self) -> None:
        raise RuntimeError("on purpose")


@pytest.mark.parametrize("make", [KilledUntold, FailedUntold])
def test_steps_that_a_lost_worker_has_made_and_not_told_of_count(
    make: type[KilledUntold], monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr("hybridtrain.engine.worker.makers.in_place._TELL_S", 1e9)
    module = make(tmp_path / "died")
    module.counts = torch.nn.Parameter(torch.zeros(240))
    strategy = HybridStrategy("hogwild", on_failure="restart")
    _, trainer = fit(strategy, 1, 2, module, TensorDataset(torch.arange(240)), max_epochs=1)
    assert (tmp_path / "died").exists()
    assert module.counts.tolist() == [0.5] * 240, "each was trained on once"
    stats = strategy.run_stats()
    assert stats["samples"] == 240 and stats["updates"] == trainer.global_step == 120
    assert stats["dropped"] == [0]


def test_how_late_steps_are_is_known_though_the_server_hears_of_them_later() -> None:
    data = TensorDataset(torch.randn(400, 4), torch.randn(400, 1))
    for n_workers in (1, 2):
        strategy = HybridStrategy("hogwild")
        fit(strategy, n_workers, 1, Regression, data, max_epochs=1)
        staleness = strategy.run_stats()["staleness"]
        assert sum(staleness["histogram"].values()) == 400
        assert staleness["max"] == 0 if n_workers == 1 else 0.3 < staleness["mean"] < 3


class Keep(pl.Callback):
    """Writes down what a checkpoint would hold of the optimizer."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            state = trainer.strategy.optimizer_state(trainer.optimizers[0])
            torch.save((state, trainer.global_step), self.path)


def kept(path: Path) -> tuple[dict[str, Any], int]:
    state, steps = torch.load(path, weights_only=False)
    return state, steps


MAKES: dict[str, Make] = {
    "sgd": partial(OPTIM.SGD, lr=0.02),
    "momentum": partial(OPTIM.SGD, lr=0.01, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "nesterov": partial(OPTIM.SGD, lr=0.01, momentum=0.9, nesterov=True),
    "adam": partial(OPTIM.Adam, lr=0.02),
    "adamw": partial(OPTIM.AdamW, lr=0.02, amsgrad=True, weight_decay=0.1),
    "fused": partial(OPTIM.Adam, lr=0.02, fused=True),
    "adagrad": partial(OPTIM.Adagrad, lr=0.1, lr_decay=0.01, initial_accumulator_value=0.1),
    "rmsprop": partial(OPTIM.RMSprop, lr=0.01, centered=True, momentum=0.5),
    "adamax": partial(OPTIM.Adamax, lr=0.02),
    "adadelta": OPTIM.Adadelta,
    "rprop": OPTIM.Rprop,
    "adafactor": OPTIM.Adafactor,
    "own": Signs,
}


@pytest.mark.parametrize("name", by_default(MAKES, "nesterov", "adamw", "adafactor", "own"))
def test_one_worker_is_plain_training_to_the_bit(name: str, tmp_path: Path) -> None:
    """Weights and the optimizer's state; the user's own optimizer object steps, as it is."""
    module = partial(Regression, MAKES[name])
    options: dict[str, Any] = {"gradient_clip_val": 1.0, "max_epochs": 2, "overfit_batches": 1.0}
    alone, _ = fit("auto", 1, 8, module, callbacks=[Keep(tmp_path / "a")], **options)
    hogwild, _ = fit(
        HybridStrategy("hogwild"), 1, 8, module, callbacks=[Keep(tmp_path / "h")], **options
    )
    assert distance(alone, hogwild) == 0.0
    theirs, ours = kept(tmp_path / "a"), kept(tmp_path / "h")
    assert ours[1] == theirs[1] == 12
    assert ours[0]["state"].keys() == theirs[0]["state"].keys()
    for number, state in theirs[0]["state"].items():
        assert ours[0]["state"][number].keys() == state.keys()
        for key, value in state.items():
            assert torch.equal(
                torch.as_tensor(ours[0]["state"][number][key]), torch.as_tensor(value)
            )


def halving(optimizer: Any) -> Any:
    return {"scheduler": OPTIM.lr_scheduler.StepLR(optimizer, 5, 0.5), "interval": "step"}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 2},
        {"precision": "bf16-true"},
        {"precision": "bf16-mixed"},
        {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_one_worker_with_a_schedule_in_steps_equals_one_device_with_each_trainer_option(
    options: dict[str, Any],
) -> None:
    module = partial(Regression, MAKES["adam"], halving)
    alone, one = fit("auto", 1, 8, module, overfit_batches=1.0, **options)
    done, other = fit(hogwild(), 1, 8, module, overfit_batches=1.0, **options)
    assert distance(alone, done) == 0.0
    assert one.global_step == other.global_step


@pytest.fixture
def steps_of_workers(monkeypatch: Any) -> torch.Tensor:
    """How many steps each worker has made itself, (W,)."""
    counts = torch.zeros(4, dtype=torch.int64).share_memory_()
    made = InPlaceOptimizer._step

    def step(self: InPlaceOptimizer, steps: Any) -> None:
        counts[self._client.worker] += 1
        made(self, steps)

    monkeypatch.setattr(InPlaceOptimizer, "_step", step)
    return counts


def hogwild(**options: Any) -> HybridStrategy:
    return HybridStrategy("hogwild", **options)


def test_hogwild_is_a_strategy_that_lightning_knows(steps_of_workers: torch.Tensor) -> None:
    fit("hogwild", 2, 4, max_epochs=1)
    assert int(steps_of_workers.sum()) >= 10


@pytest.mark.parametrize("make", [MAKES["adam"], MAKES["own"]])
def test_workers_step_themselves_and_every_step_is_counted_once(
    make: Make, steps_of_workers: torch.Tensor, tmp_path: Path
) -> None:
    """A count that two workers raise at the same moment would lose one."""
    keep = Keep(tmp_path / "k")
    _, trainer = fit(hogwild(), 3, 1, partial(Regression, make), callbacks=[keep], max_epochs=4)
    state, steps = kept(tmp_path / "k")
    assert steps == trainer.global_step == 4 * 48
    assert {float(each["step"]) for each in state["state"].values()} == {4.0 * 48}
    by_server = 4 * 48 - int(steps_of_workers.sum())
    assert 1 <= by_server <= 3, "only the first gradient of each goes to the server"
    assert (steps_of_workers[:3] > 0).all()


class Disjoint(pl.LightningModule):
    """Each worker trains a parameter of its own, towards the same target."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList([torch.full((5,), 3.0 + n) for n in range(2)])
        self.make = make

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.parts[self.global_rank] - torch.arange(5.0)).pow(2).sum()

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["momentum", "adam", "adagrad"])
def test_two_workers_on_parameters_of_their_own_are_two_single_runs(
    name: str, tmp_path: Path
) -> None:
    """Whatever each has stepped, and however often, is exactly what it would be alone."""
    keep = Keep(tmp_path / "k")
    make = partial(MAKES[name], fused=False)  # where the user has not chosen, the fused one steps
    done, trainer = fit(hogwild(), 2, 1, partial(Disjoint, make), callbacks=[keep], max_epochs=2)
    state, steps = kept(tmp_path / "k")
    assert steps == 2 * 48
    samples = trainer.strategy.run_stats()["samples_per_worker"]
    assert sum(samples) == 2 * 48
    for number in (0, 1):
        alone = torch.nn.Parameter(torch.full((5,), 3.0 + number))
        optimizer = make([alone])
        for _ in range(samples[number]):
            optimizer.zero_grad()
            (alone - torch.arange(5.0)).pow(2).sum().backward()
            optimizer.step()
        assert torch.equal(done.parts[number], alone), number
        for key, value in optimizer.state[alone].items():
            assert torch.equal(state["state"][number][key], value), (number, key)


def test_a_checkpoint_goes_on_elsewhere_and_one_from_elsewhere_here(tmp_path: Path) -> None:
    module = partial(Regression, MAKES["adamw"])
    started, trainer = fit(hogwild(), 2, 4, module, max_epochs=2)
    trainer.save_checkpoint(tmp_path / "hogwild.ckpt")
    saved = torch.load(tmp_path / "hogwild.ckpt", weights_only=True)
    assert saved["global_step"] == 24
    states = saved["optimizer_states"][0]["state"].values()
    assert all(float(state["step"]) == 24 for state in states)
    for name, value in started.state_dict().items():
        assert torch.equal(saved["state_dict"][name], value)
    _, single = fit("auto", 1, 8, module, max_epochs=4, ckpt_path=str(tmp_path / "hogwild.ckpt"))
    assert single.global_step == 24 + 2 * 6
    single.save_checkpoint(tmp_path / "single.ckpt")
    keep = Keep(tmp_path / "k")
    fit(
        hogwild(),
        2,
        4,
        module,
        callbacks=[keep],
        max_epochs=5,
        ckpt_path=str(tmp_path / "single.ckpt"),
    )
    state, steps = kept(tmp_path / "k")
    assert steps == 36 + 12
    assert {float(each["step"]) for each in state["state"].values()} == {48.0}


class Private(pl.Callback):
    """Whether others can write to what a checkpoint is made of, while it is written."""

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        state, live = checkpoint["state_dict"], module.state_dict()
        for name in state if trainer.is_global_zero else ():
            assert torch.equal(state[name], live[name])
            assert state[name].data_ptr() != live[name].data_ptr(), name


def test_nobody_writes_to_a_checkpoint_that_is_being_written(tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
    fit("hogwild", 1, 4, callbacks=[keep, Private()], enable_checkpointing=True)
    assert list(tmp_path.iterdir())


class Embedded(pl.LightningModule):
    """Sparse gradients: the case that Hogwild was made for."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(64, 3, sparse=True)
        self.make = make

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows = (batch[0][:, 0].abs() * 20).long().clamp(max=63)
        return (self.table(rows) - batch[0][:, :3]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "SparseAdam", "Adam"])
def test_sparse_gradients_are_stepped_as_they_are(
    name: str, steps_of_workers: torch.Tensor
) -> None:
    """``Adam`` takes none: here it gets dense ones, where torch would refuse."""
    module = partial(Embedded, partial(getattr(OPTIM, name), lr=0.1))
    done, _ = fit(hogwild(), 1, 8, module, overfit_batches=1.0)
    assert int(steps_of_workers[0]) == 3 * 6 - 1
    if name == "Adam":
        return
    alone, _ = fit("auto", 1, 8, module, overfit_batches=1.0)
    # The server's first step sums the values of a row that occurs twice before it scales them.
    assert distance(alone, done) <= (1e-7 if name == "SGD" else 0.0)


class Adversaries(pl.LightningModule):
    """Two optimizers that take turns, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.one, self.other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for sign, optimizer in zip((1.0, -0.1), self.optimizers(), strict=True):
            optimizer.zero_grad()
            made = self.other(self.one(batch[0]).tanh())
            self.manual_backward(sign * (made - batch[1]).pow(2).mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        first = OPTIM.Adam(self.one.parameters(), lr=0.01)
        return [first, OPTIM.SGD(self.other.parameters(), lr=0.001, momentum=0.9)]


def test_several_optimizers_stepped_by_hand_equal_one_device_to_the_bit(
    steps_of_workers: torch.Tensor,
) -> None:
    alone, _ = fit("auto", 1, 8, Adversaries, overfit_batches=1.0)
    done, trainer = fit(hogwild(), 1, 8, Adversaries, overfit_batches=1.0)
    assert distance(alone, done) == 0.0
    assert int(steps_of_workers[0]) == trainer.global_step - 2 == 2 * 18 - 2


class Changing(Regression):
    """Freezes its first layer, and trains it from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return OPTIM.Adam(self.net[2].parameters(), lr=0.02)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[0].requires_grad_(True)
            self.optimizers().add_param_group({"params": list(self.net[0].parameters())})


def test_layers_may_join_in_mid_run(steps_of_workers: torch.Tensor) -> None:
    alone, _ = fit("auto", 1, 8, Changing, overfit_batches=1.0)
    done, _ = fit(hogwild(), 1, 8, Changing, overfit_batches=1.0)
    assert distance(alone, done) == 0.0
    assert int(steps_of_workers[0]) == 3 * 6 - 2
    both, trainer = fit(hogwild(), 2, 4, Changing)
    assert trainer.global_step == 3 * 12
    assert all(torch.isfinite(p).all() for p in both.parameters())


class Resetting(Regression):
    """Clears the optimizer's state in the middle, as restarts of the momentum do."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 2:
            self.optimizers().optimizer.state.clear()


def test_user_code_may_change_the_shared_state_of_the_optimizer(
    steps_of_workers: torch.Tensor,
) -> None:
    module = partial(Resetting, MAKES["adam"])
    alone, _ = fit("auto", 1, 8, module, overfit_batches=1.0)
    done, _ = fit(hogwild(), 1, 8, module, overfit_batches=1.0)
    assert distance(alone, done) == 0.0
    assert int(steps_of_workers[0]) == 3 * 6 - 2


class Teacher(Regression):
    """Moves a frozen copy along by hand: under DDP each process has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = torch.nn.Linear(4, 1).requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return OPTIM.SGD(self.net.parameters(), lr=0.01)

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        self.teacher.weight.add_(1.0)


def test_what_no_optimizer_steps_is_each_workers_own() -> None:
    before = Teacher()
    done, trainer = fit(hogwild(), 2, 4, Teacher, max_epochs=2)
    pl.seed_everything(7, verbose=False)
    before = Teacher()
    moved = (done.teacher.weight - before.teacher.weight).round()
    mine = trainer.strategy.run_stats()["samples_per_worker"][0] // 4
    assert moved.unique().tolist() == [float(mine)], "worker 0's mini-batches, not everybody's"


class SparseLogistic(pl.LightningModule):
    """Ten of two thousand features are there in each sample; one weight for each."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.EmbeddingBag(2000, 1, mode="sum", sparse=True)
        torch.nn.init.zeros_(self.weights.weight)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.weights(batch[0])[:, 0]
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = OPTIM.SGD(self.parameters(), lr=0.5)
        schedule = OPTIM.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


@pytest.mark.slow
def test_workers_without_a_lock_end_where_one_alone_does() -> None:
    """Sparse data: the loss of 2 and 4 workers after five epochs is within 1 % of that of one."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randint(2000, (8000, 10), generator=generator)
    planted = torch.randn(2000, generator=generator)
    labels = (planted[features].sum(1) > 0).float()
    data = TensorDataset(features, labels)

    @torch.no_grad()
    def loss(strategy: Any, workers: int) -> float:
        done, _ = fit(strategy, workers, 8, SparseLogistic, data, max_epochs=5)
        logits = done.weights(features)[:, 0]
        return float(torch.nn.functional.binary_cross_entropy_with_logits(logits, labels).detach())

    alone = loss("auto", 1)
    assert alone < 0.5, "0.69 without training"
    for workers in (2, 4):
        assert loss(hogwild(), workers) == pytest.approx(alone, rel=0.01)


# ---- faults -------------------------------------------------------------------------------------


class Poisoned(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * (torch.nan if batch_idx == 3 else 1.0)


def test_a_gradient_that_is_not_finite_is_seen_before_anybody_is_hurt() -> None:
    with pytest.raises(UserError, match="has a gradient that is not finite"):
        fit(hogwild(), 2, 4, Poisoned)
    done, trainer = fit(hogwild(on_nonfinite="drop"), 2, 4, Poisoned, max_epochs=2)
    assert all(torch.isfinite(p).all() for p in done.parameters())
    left_out = sum(trainer.strategy.run_stats()["left_out"]["nonfinite"])
    assert trainer.global_step == 24 - left_out
    assert 2 <= left_out <= 4, (
        "in each epoch at least one of the two comes to its fourth mini-batch"
    )


# ---- bad input ----------------------------------------------------------------------------------


class Counting(torch.optim.SGD):
    """Keeps a figure in its groups."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
        return loss


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (OPTIM.NAdam, "NAdam .* keeps 'mu_product' .*; use SGD, Adam"),
        (OPTIM.ASGD, "ASGD .* keeps 'eta'"),
        (partial(Counting, lr=0.01), "Counting .* in its parameter groups .*seen"),
        (OPTIM.LBFGS, "LBFGS was given, which evaluates its closure several times"),
    ],
)
def test_optimizers_whose_state_cannot_be_shared_are_refused(make: Make, text: str) -> None:
    with pytest.raises(UserError, match=text):
        fit(hogwild(), 2, 4, partial(Regression, make))


def test_a_correction_is_refused_because_no_gradient_is_sent() -> None:
    with pytest.raises(UserError, match=r"correction=.* under hogwild .* leave it out"):
        fit(hogwild(correction="gap_aware"), 2, 4)


@pytest.mark.parametrize(
    "callback",
    [StochasticWeightAveraging(swa_lrs=0.01), EMAWeightAveraging()],
    ids=lambda each: type(each).__name__,
)
def test_averages_that_are_swapped_in_are_refused(callback: pl.Callback) -> None:
    with pytest.raises(UserError, match="these are shared by all 2 workers"):
        fit(hogwild(), 2, 4, callbacks=[callback])


def test_a_gpu_is_refused() -> None:
    with pytest.raises(UserError, match=r"'cuda' .* host memory; use .*accelerator='cpu'"):
        check_lock_free(SimpleNamespace(accelerator=CUDAAccelerator()), 1)


class Dropping(Regression):
    def __init__(self, make: Any) -> None:
        super().__init__(make)
        self.net.insert(1, torch.nn.Dropout(0.3))


@pytest.mark.slow
def test_one_hogwild_worker_equals_ddp_with_one_process_to_the_bit() -> None:
    """Shuffled, and with dropout: in the order, and with the random numbers, that DDP has."""
    module = partial(Dropping, partial(torch.optim.Adam, lr=0.01))
    theirs, _ = fit("ddp_fork", 1, 4, module, regression_data(37))
    ours, _ = fit("hogwild", 1, 4, module, regression_data(37))
    assert torch.equal(flat(ours), flat(theirs))


# ---- state of each worker's own -----------------------------------------------------------------


def private(**options: Any) -> HybridStrategy:
    return hogwild(exchange={"name": "in_place", "optimizer_state": "private"}, **options)


@pytest.mark.parametrize("name", by_default(["nesterov", "adam", "own"], "adam"))
def test_private_state_of_one_worker_is_plain_training_and_goes_on(
    name: str, tmp_path: Path, steps_of_workers: torch.Tensor
) -> None:
    module = partial(Regression, MAKES[name])
    options: dict[str, Any] = {"overfit_batches": 1.0}
    alone, _ = fit("auto", 1, 8, module, max_epochs=4, callbacks=[Keep(tmp_path / "a")], **options)
    _, trainer = fit(private(), 1, 8, module, max_epochs=2, **options)
    assert int(steps_of_workers[0]) == 12, "the first, too"
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    ours, _ = fit(
        private(), 1, 8, module, max_epochs=4, ckpt_path=str(tmp_path / "two.ckpt"),
        callbacks=[Keep(tmp_path / "p")], **options,
    )  # fmt: skip
    assert distance(alone, ours) == 0.0
    theirs, mine = (kept(tmp_path / each)[0]["state"] for each in "ap")
    assert all(torch.equal(torch.as_tensor(mine[n][k]), torch.as_tensor(v))
               for n, state in theirs.items() for k, v in state.items())  # fmt: skip


def test_workers_with_private_state_count_their_own_steps(tmp_path: Path) -> None:
    keep = Keep(tmp_path / "k")
    module = partial(Regression, MAKES["adam"])
    _, trainer = fit(private(), 2, 1, module, callbacks=[keep], max_epochs=2)
    state, steps = kept(tmp_path / "k")
    assert steps == trainer.global_step == 2 * 48
    mine = trainer.strategy.run_stats()["samples_per_worker"][0]
    assert {float(each["step"]) for each in state["state"].values()} == {float(mine)}
    assert 0 < mine < 2 * 48


def test_user_code_may_change_private_state(steps_of_workers: torch.Tensor) -> None:
    module = partial(Resetting, MAKES["adam"])
    alone, _ = fit("auto", 1, 8, module, overfit_batches=1.0)
    done, _ = fit(private(), 1, 8, module, overfit_batches=1.0)
    assert distance(alone, done) == 0.0
    assert int(steps_of_workers[0]) == 3 * 6, "the server makes none"


def test_an_optimizer_state_other_than_shared_or_private_is_refused() -> None:
    with pytest.raises(UserError, match=r"optimizer_state=.mine. .* shared or private"):
        hogwild(exchange={"name": "in_place", "optimizer_state": "mine"})
