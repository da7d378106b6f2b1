"""Every optimizer of torch, and users' own, equals one process on the union of the batches.

Final weights *and* ``optimizer.state_dict()`` are compared. One process means Lightning's single
device; its mini-batches of 12 in order are the union of what two workers get.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from tests.lightning.toys import Regression, distance, fit, flat
from tests.picking import by_default

Make = Callable[[Any], Any]
OPTIM = torch.optim


class Keep(pl.Callback):
    """Writes down what a checkpoint would hold of each optimizer, and of its parameter groups."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            states = [trainer.strategy.optimizer_state(o) for o in trainer.optimizers]
            torch.save(states, self.path)


def trained(
    strategy: str, workers: int, module: Any, folder: Path, **options: Any
) -> tuple[pl.LightningModule, list[dict[str, Any]]]:
    """The module and its optimizers' states after eight steps on twelve samples each."""
    path = folder / f"{strategy}{workers}.pt"
    settings: dict[str, Any] = {"overfit_batches": 1.0, "max_epochs": 2} | options
    done, _ = fit(strategy, workers, 12 // workers, module, callbacks=[Keep(path)], **settings)
    return done, torch.load(path, weights_only=False)


def assert_same(one: Any, other: Any, tolerance: float, where: str = "") -> None:
    """Equal structure, numbers within the tolerance."""
    if isinstance(one, torch.Tensor):
        one, other = (t.to_dense() if t.is_sparse else t for t in (one, other))  # of one meaning
        torch.testing.assert_close(
            one,
            other,
            rtol=tolerance,
            atol=tolerance,
            check_dtype=one.ndim > 0,  # a count of steps has the default dtype of its process
            msg=lambda m: f"{where}: {m}",
        )
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], tolerance, f"{where}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for n, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, tolerance, f"{where}/{n}")
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=tolerance, abs=tolerance), where
    else:
        assert one == other, where


def compare(
    module: Any, folder: Path, tolerance: float = 1e-5, workers: int = 2, **options: Any
) -> float:
    """Train alone and shared; returns by how much the weights differ."""
    alone, theirs = trained("auto", 1, module, folder, **options)
    shared, ours = trained("hybrid", workers, module, folder, **options)
    assert distance(alone, fresh(module)) > 1e-4, "something was learned"
    torch.testing.assert_close(flat(shared), flat(alone), rtol=tolerance, atol=tolerance)
    assert_same(theirs, ours, tolerance)
    return distance(shared, alone)


def fresh(module: Any) -> pl.LightningModule:
    """As ``fit`` makes it, untrained."""
    pl.seed_everything(7, verbose=False)
    return module()


# ---- torch's own --------------------------------------------------------------------------------

SEPARATE = {"LBFGS", "SparseAdam", "Muon", "Optimizer"}  # each has tests of its own
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "Adadelta": [{"lr": 1.0}, {"lr": 1.0, "weight_decay": 0.1, "maximize": True}],
    "Adafactor": [{"lr": 0.05}],
    "Adagrad": [{"lr": 0.05}, {"lr": 0.05, "lr_decay": 0.1, "initial_accumulator_value": 0.1}],
    "Adam": [
        {"lr": 0.01, "amsgrad": True},
        {"lr": 0.01, "foreach": True},
        {"lr": 0.01, "fused": True},
        {"lr": 0.01, "maximize": True},
    ],
    "AdamW": [
        {"lr": torch.tensor(0.01)},
        {"lr": 0.01, "foreach": False, "fused": False, "amsgrad": True},
    ],
    "RMSprop": [{"lr": 0.01}, {"lr": 0.01, "momentum": 0.9, "centered": True}],
    "SGD": [
        {"lr": 0.02},
        {"lr": torch.tensor(0.02), "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01},
        {"lr": 0.01, "momentum": 0.9, "nesterov": True},
        {"lr": 0.001, "maximize": True, "momentum": 0.5},
        {"lr": 0.02, "momentum": 0.9, "fused": True},
    ],
}  # fmt: skip


# The arithmetic of the others is compared in tests/updates, without processes.
BY_DEFAULT = ("Adafactor", "AdamW", "Rprop", "SGD")


def kinds() -> list[Any]:
    """All public optimizers that torch has, those of a later version too."""
    found = {
        name: kind
        for name, kind in vars(OPTIM).items()
        if inspect.isclass(kind) and issubclass(kind, OPTIM.Optimizer) and name not in SEPARATE
    }
    return [
        pytest.param(
            kind,
            options,
            id=f"{name}-{n}",
            marks=() if name in BY_DEFAULT and n == 0 else pytest.mark.slow,
        )
        for name, kind in sorted(found.items())
        for n, options in enumerate(OPTIONS.get(name, [{"lr": 0.01}]))
    ]


def grouped(parameters: Any, kind: Any, options: dict[str, Any]) -> Any:
    """Two groups, the second with a smaller learning rate."""
    first, second, *rest = list(parameters)
    other = dict(options, lr=options["lr"] * 0.5) if "lr" in options else options
    return kind([{"params": [first, second]}, {"params": rest, **other}], **options)


@pytest.mark.few(2)
@pytest.mark.parametrize(("kind", "options"), kinds())
def test_every_optimizer_of_torch_equals_one_process(
    kind: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    compare(partial(Regression, partial(grouped, kind=kind, options=options)), tmp_path)


def test_muon_steps_the_matrices_and_another_optimizer_the_rest(tmp_path: Path) -> None:
    class Mixed(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            for optimizer in self.optimizers():
                optimizer.step()

        def configure_optimizers(self) -> Any:
            matrices = [p for p in self.parameters() if p.ndim == 2]
            rest = [p for p in self.parameters() if p.ndim != 2]
            return OPTIM.Muon(matrices, lr=0.01), OPTIM.NAdam(rest, lr=0.01)

    compare(Mixed, tmp_path)


def test_capturable_is_a_matter_of_the_device_and_works(tmp_path: Path) -> None:
    """One process refuses it on a CPU; it asks for nothing that is not given in host memory."""
    adam = partial(OPTIM.NAdam, lr=0.01)
    plain, _ = trained("hybrid", 2, partial(Regression, adam), tmp_path)
    shared, states = trained(
        "hybrid", 2, partial(Regression, partial(adam, capturable=True)), tmp_path
    )
    assert states[0]["param_groups"][0]["capturable"] is True
    assert distance(shared, plain) == 0.0


# ---- users' own ---------------------------------------------------------------------------------


class Wandering(OPTIM.Optimizer):
    """Keeps figures everywhere: in state under its own names, in groups, on itself."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "seen": 0.0})
        self.calls = 0
        self.norms: list[float] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.calls += 1
        self.state["whole"] = {"calls": self.calls, "loss": float(loss)}
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("trail", []).append(float(p.grad.sum()))
                state["slow"] = state.get("slow", 0) * 0.9 + p.grad
                group["seen"] += float(p.grad.abs().sum())
                p.data.add_(state["slow"], alpha=-group["lr"] / group["k"])
        return loss

    def state_dict(self) -> Any:
        return {**super().state_dict(), "calls": self.calls}

    def load_state_dict(self, state_dict: Any) -> None:
        state_dict = dict(state_dict)
        self.calls = state_dict.pop("calls")
        super().load_state_dict(state_dict)


WANDERING = partial(Wandering, lr=0.05)


def test_a_users_optimizer_keeps_state_wherever_it_likes(tmp_path: Path) -> None:
    compare(partial(Regression, WANDERING), tmp_path)


def test_hyper_parameters_that_an_optimizer_changes_are_seen_in_the_module(tmp_path: Path) -> None:
    class Watching(Regression):
        def on_train_batch_end(self, *_: Any) -> None:
            (group,) = self.optimizers().param_groups
            assert group["k"] == self.global_step
            group["lr"] *= 0.9  # which must not bring the old k back

    compare(partial(Watching, WANDERING), tmp_path)


def test_a_users_optimizer_resumes_to_the_bit(tmp_path: Path) -> None:
    from tests.lightning.checkpointing.test_checkpoints import saved

    module = partial(Regression, WANDERING)
    path = saved("hybrid", 2, 6, module, tmp_path)
    resumed, _ = fit("hybrid", 2, 6, module, ckpt_path=str(path), max_epochs=4)
    whole, _ = fit("hybrid", 2, 6, module, max_epochs=4)
    assert torch.equal(flat(resumed), flat(whole))


class Careless(OPTIM.Optimizer):
    """Takes a closure and never calls it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.01)


def test_an_optimizer_that_never_calls_its_closure_works_all_the_same() -> None:
    careless, _ = fit("hybrid", 2, 6, partial(Regression, Careless))
    plain, _ = fit("hybrid", 2, 6, partial(Regression, partial(OPTIM.SGD, lr=0.01)))
    assert distance(careless, plain) == 0.0


def test_what_an_optimizer_does_not_know_stays(tmp_path: Path) -> None:
    class Part(Regression):
        def configure_optimizers(self) -> Any:
            return OPTIM.AdamW(self.net[2].parameters(), lr=0.01)

    compare(Part, tmp_path)
    assert torch.equal(fit("hybrid", 2, 6, Part)[0].net[0].weight, fresh(Part).net[0].weight)


def test_two_optimizers_may_share_a_parameter(tmp_path: Path) -> None:
    class Sharing(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(super().training_step(batch, batch_idx))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return (
                OPTIM.Adam(self.parameters(), lr=0.01),
                OPTIM.SGD(self.net[2].parameters(), lr=0.01, momentum=0.9),
            )

    compare(Sharing, tmp_path)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "schedule",
    by_default(
        [OPTIM.lr_scheduler.StepLR, OPTIM.lr_scheduler.ConstantLR], OPTIM.lr_scheduler.StepLR
    ),
)
@pytest.mark.parametrize("kind", [OPTIM.Adam, OPTIM.SGD])
def test_a_learning_rate_in_a_tensor_follows_its_schedule(
    kind: Any, schedule: Any, tmp_path: Path
) -> None:
    options = {"step_size": 1} if schedule is OPTIM.lr_scheduler.StepLR else {"factor": 0.5}

    def make(parameters: Any) -> Any:
        return kind(parameters, lr=torch.tensor(0.01))  # a new one: it changes in place

    compare(partial(Regression, make, partial(schedule, **options)), tmp_path, max_epochs=3)
