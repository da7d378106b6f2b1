"""A gradient that is not finite, or memory that runs out, follows the user's stated policy."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.spike import TrainingSpikeException
from pytorch_lightning.callbacks import SpikeDetection
from torch.utils.data import DataLoader, Dataset

from hybridtrain import HybridStrategy
from hybridtrain.engine.samplers import Seeded
from hybridtrain.engine.step.guard import NotFinite, sample_ids
from hybridtrain.errors import UserError
from tests.lightning.toys import Manual, Regression, flat, make_trainer, regression_data
from tests.picking import by_default

SEED, EPOCHS, BATCH = 7, 2, 6  # mini-batch of each of two workers
POISON = 17  # this sample is not a number


class Numbered(Dataset[Any]):
    """Samples that say who they are; one of them is bad."""

    def __init__(self) -> None:
        self.x, self.y = regression_data(40).tensors
        self.x[POISON, 0] = torch.inf

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "y": self.y[index], "sample_ids": index}


class Net(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.nn.functional.mse_loss(self.net(batch["x"]), batch["y"])


class Looking(Net):
    """Has a hook that looks at gradients, which must be those of the others."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert all(bool(p.grad.isfinite().all()) for p in self.parameters())


class ByHand(Manual, Net):
    pass


class NoMemory(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 1 bytes")


class Hungry(Net):
    """The bad sample needs too much memory instead."""

    where = "forward"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        bad = ~batch["x"].isfinite()
        if bad.any():
            if self.where == "forward":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
            batch["x"] = torch.where(bad, 0.0, batch["x"])
            batch["y"] = NoMemory.apply(batch["y"].requires_grad_())
        return super().training_step(batch, batch_idx)


class HungryBackward(Hungry):
    where = "backward"


class HungryManual(Hungry, ByHand):
    pass


def train(module: Callable[[], pl.LightningModule], workers: int = 2, **options: Any) -> Any:
    strategy = HybridStrategy(
        options.pop("policy", "hybrid"),
        on_nonfinite=options.pop("on_nonfinite", "raise"),
        on_oom=options.pop("on_oom", "raise"),
    )
    pl.seed_everything(SEED, verbose=False)
    made = module()
    trainer = make_trainer(strategy, workers, **({"max_epochs": EPOCHS} | options))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(made, DataLoader(Numbered(), BATCH, shuffle=True))
    return made, trainer


def expected(choice: str, accumulate: int = 1) -> torch.nn.Module:
    """What plain torch makes of the same mini-batches, by the rule that the choice states."""
    pl.seed_everything(SEED, verbose=False)
    module, data = Net(), Numbered()
    size = 2 * BATCH
    for epoch in range(EPOCHS):
        order = Seeded(len(data), SEED)(epoch)
        steps = [order[i : i + size] for i in range(0, len(order), size)]
        for first in range(0, len(steps), accumulate):
            # Everything that a worker has accumulated since the last step counts, or none of it.
            parts = [[s[w::2] for s in steps[first : first + accumulate]] for w in range(2)]
            good = [p for p in parts if not any(POISON in batch for batch in p)]
            if len(good) < 2 and choice == "skip_step":
                continue
            gradient = torch.zeros_like(flat(module))
            total = sum(len(batch) for p in good for batch in p)
            for batches in good:
                weight = sum(map(len, batches)) / total
                gradient += weight * sum(_gradient(module, data, b) for b in batches) / accumulate
            moved = (flat(module) - 0.01 * gradient).float()
            torch.nn.utils.vector_to_parameters(moved, module.parameters())
    return module


def _gradient(module: Any, data: Numbered, batch: list[int]) -> torch.Tensor:
    if not batch:
        return torch.zeros_like(flat(module))
    loss = torch.nn.functional.mse_loss(module.net(data.x[batch].float()), data.y[batch].float())
    grads = torch.autograd.grad(loss, list(module.parameters()))
    return torch.cat([g.flatten() for g in grads]).double()


# ---- not finite ---------------------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize("policy", ["hybrid", "async"])
@pytest.mark.parametrize("module", [Net, Looking, ByHand])
def test_a_gradient_that_is_not_finite_ends_the_run_and_names_worker_step_and_samples(
    module: Any, policy: str
) -> None:
    if module is Looking and policy == "async":
        policy = "hybrid"  # a free-running worker's hooks see its own gradient, so they fail first
    with pytest.raises(NotFinite) as caught:
        train(module, policy=policy)
    text = str(caught.value)
    assert "worker " in text and "(cpu) at step " in text and "epoch 0, mini-batch " in text
    assert "net.0.weight (" in text and "of 64 elements)" in text
    assert "samples sample_ids=[" in text and f"{POISON}" in text
    assert "on_nonfinite=drop" in text


@pytest.mark.few(2)
@pytest.mark.parametrize("choice", ["drop", "skip_step"])
@pytest.mark.parametrize("module", [Net, Looking, ByHand])
def test_on_nonfinite_leaves_out_the_worker_or_the_whole_step(module: Any, choice: str) -> None:
    ours, trainer = train(module, on_nonfinite=choice)
    torch.testing.assert_close(flat(ours), flat(expected(choice)), rtol=1e-5, atol=1e-6)
    assert trainer.global_step == EPOCHS * 4, "a step that is left out counts, as a skipped one"
    left_out = trainer.strategy.run_stats()["left_out"]
    assert sum(left_out.pop("nonfinite")) == EPOCHS and not left_out


class Normalised(Net):
    def __init__(self) -> None:
        super().__init__()
        first = self.net[0]
        self.net.insert(0, torch.nn.BatchNorm1d(first.in_features))


class LookingNormalised(Normalised, Looking):
    pass


@pytest.mark.parametrize("module", [Normalised, LookingNormalised])
@pytest.mark.parametrize("choice", ["drop", "skip_step"])
def test_a_mini_batch_that_is_left_out_leaves_no_statistics(module: Any, choice: str) -> None:
    ours, _ = train(module, on_nonfinite=choice)
    assert ours.net[0].running_mean.isfinite().all() and ours.net[0].running_var.isfinite().all()


@pytest.mark.parametrize("module", [Net, Looking])
def test_mini_batches_accumulated_with_a_nonfinite_one_are_left_out_as_well(module: Any) -> None:
    ours, _ = train(module, on_nonfinite="drop", accumulate_grad_batches=2)
    want = flat(expected("drop", accumulate=2))
    torch.testing.assert_close(flat(ours), want, rtol=1e-5, atol=1e-6)


def test_a_step_that_leaves_out_all_workers_moves_no_parameter() -> None:
    class Bad(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * torch.nan

    for module in (Bad, type("BadLooking", (Bad,), {"on_after_backward": lambda self: None})):
        ours, trainer = train(module, on_nonfinite="drop")
        pl.seed_everything(SEED, verbose=False)
        assert torch.equal(flat(ours), flat(Net()))
        assert trainer.strategy.run_stats()["left_out"] == {"nonfinite": [8, 8]}


def test_free_running_workers_leave_out_only_their_own_nonfinite_mini_batches() -> None:
    ours, trainer = train(Net, policy="async", on_nonfinite="drop")
    assert flat(ours).isfinite().all()
    stats = trainer.strategy.run_stats()
    assert sum(stats["left_out"]["nonfinite"]) == EPOCHS
    assert stats["samples"] == EPOCHS * (40 - BATCH)


def test_a_gradient_scaler_sees_to_overflows_itself() -> None:
    """Infinities are how it finds its scale; that they are skipped is its business."""
    from hybridtrain.engine.memory import Layout, Store
    from hybridtrain.engine.step.guard import OnFault
    from hybridtrain.engine.worker.finite import FiniteCheck
    from hybridtrain.lightning.step.gradient_guard import GradientGuard

    layout = Layout.of([("a", torch.zeros(3))])
    store = Store(layout, 1, False)
    store.gradient(0, layout.slots[0])[1] = torch.inf
    trainer, use = make_trainer("auto", 1), Mock()
    for scaler, accepted in ((object(), True), (None, False)):
        trainer.precision_plugin.scaler = scaler  # type: ignore[attr-defined]
        guard = GradientGuard(OnFault("drop"), FiniteCheck(store, 0), layout, trainer, use, Mock())
        if scaler is None:
            trainer.fit_loop.epoch_loop.batch_progress.current.ready = 1
            with pytest.warns(UserWarning, match=r"a \(1 of 3 .*; its gradient is left out"):
                assert guard.accepts((0,), ()) is accepted
        else:
            assert guard.accepts((0,), ()) is accepted


class Boundless(Net):
    """The loss is not finite either."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + 0 * batch["x"].sum()


def watcher(folder: Path, finite_only: bool) -> SpikeDetection:
    return SpikeDetection(
        rtol=None, atol=1e9, finite_only=finite_only, warmup=0, exclude_batches_path=folder
    )


@pytest.mark.parametrize("finite_only", [True, False])
def test_a_callback_that_looks_for_nonfinite_losses_decides_by_default(
    finite_only: bool, tmp_path: Path
) -> None:
    ends = pytest.raises(TrainingSpikeException) if finite_only else nullcontext()
    with ends:
        options = {"on_nonfinite": "auto", "callbacks": [watcher(tmp_path, finite_only)]}
        module, _ = train(Boundless, **options)
    if not finite_only:
        assert flat(module).isfinite().all(), "what is not finite counts for nothing"
    else:
        assert (tmp_path / "skip_batches.json").is_file()


def test_a_nonfinite_gradient_ends_the_run_where_no_callback_can_see_it(tmp_path: Path) -> None:
    assert HybridStrategy().on_fault.nonfinite == "auto"
    for module, callback in ((Boundless, pl.Callback()), (Net, watcher(tmp_path, True))):
        with pytest.raises(NotFinite):
            train(module, on_nonfinite="auto", callbacks=[callback])


# ---- out of memory ------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [Hungry, HungryBackward, HungryManual])
def test_by_default_running_out_of_memory_ends_the_run_with_advice(module: Any) -> None:
    with pytest.raises(RuntimeError, match="memory") as caught:
        train(module)
    if module is not HungryManual:
        notes = "\n".join(caught.value.__notes__)
        assert "This happened in worker" in notes and "strategy.on_oom=drop" in notes


@pytest.mark.parametrize("choice", ["drop", "skip_step"])
@pytest.mark.parametrize("module", by_default([Hungry, HungryBackward], HungryBackward))
def test_the_worker_without_memory_or_the_step_is_left_out(module: Any, choice: str) -> None:
    ours, trainer = train(module, on_oom=choice)
    torch.testing.assert_close(flat(ours), flat(expected(choice)), rtol=1e-5, atol=1e-6)
    left_out = trainer.strategy.run_stats()["left_out"]
    assert sum(left_out.pop("oom")) == EPOCHS and not left_out


def test_other_errors_are_never_forgiven() -> None:
    class Broken(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        train(Broken, on_oom="drop", on_nonfinite="drop")


# ---- input --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["on_nonfinite", "on_oom"])
def test_an_unknown_choice_is_refused_with_those_that_are_known(name: str) -> None:
    with pytest.raises(UserError, match=rf"{name}='ignore' was given.*raise, drop or skip_step"):
        HybridStrategy(**{name: "ignore"})


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ({"x": 1, "ids": torch.tensor([[4], [5]])}, "ids=[4, 5]"),
        ({"files": ["a.wav", "b.wav"]}, "files=['a.wav', 'b.wav']"),
        ((torch.zeros(2), torch.zeros(2)), None),
        (torch.zeros(3), None),
    ],
)
def test_samples_are_named_where_the_mini_batch_knows_them(batch: Any, text: str | None) -> None:
    assert sample_ids(batch) == text


def test_a_long_list_of_samples_is_cut() -> None:
    text = sample_ids({"ids": torch.arange(10_000)})
    assert text is not None and len(text) < 220 and text.endswith("...")
