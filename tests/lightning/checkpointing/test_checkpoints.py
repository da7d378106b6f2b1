"""Checkpoints are ordinary Lightning checkpoints, and travel between strategies."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from tests.lightning.toys import Regression, distance, fit, flat, make_trainer, regression_data
from tests.picking import by_default

ADAM = partial(torch.optim.Adam, lr=0.01)
NESTEROV = partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True)


def saved(
    strategy: str,
    workers: int,
    batch: int,
    module: Any,
    folder: Path,
    epochs: int = 2,
    **options: Any,
) -> Path:
    """Train for some epochs and return the last checkpoint."""
    checkpoint = ModelCheckpoint(folder, save_last=True)
    fit(
        strategy,
        workers,
        batch,
        module,
        max_epochs=epochs,
        callbacks=[checkpoint],
        enable_checkpointing=True,
        **options,
    )
    return folder / "last.ckpt"


@pytest.mark.few(2)
@pytest.mark.parametrize("make", [ADAM, NESTEROV])
@pytest.mark.parametrize("strategy", ["hybrid", "async"])
def test_a_checkpoint_has_the_form_that_torch_would_write(
    strategy: str, make: Any, tmp_path: Path
) -> None:
    path = saved(strategy, 2, 6, partial(Regression, make), tmp_path)
    checkpoint = torch.load(path, weights_only=True)
    module = Regression(make)
    module.load_state_dict(checkpoint["state_dict"])
    optimizer = make(module.parameters())
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    states = [optimizer.state[p] for p in module.parameters()]
    assert all(states)
    for parameter, state in zip(module.parameters(), states, strict=True):
        tensors = [v for k, v in state.items() if k != "step"]
        assert all(t.shape == parameter.shape and bool(t.any()) for t in tensors)
    assert path.stat().st_size < 50_000  # no view has dragged a whole buffer along


@pytest.mark.parametrize("make", by_default([ADAM, NESTEROV], ADAM))
def test_resumed_equals_uninterrupted_to_the_bit(make: Any, tmp_path: Path) -> None:
    module = partial(Regression, make)
    path = saved("hybrid", 3, 4, module, tmp_path)
    resumed, trainer = fit("hybrid", 3, 4, module, ckpt_path=str(path), max_epochs=5)
    whole, _ = fit("hybrid", 3, 4, module, max_epochs=5)
    assert trainer.global_step == 20
    assert torch.equal(flat(resumed), flat(whole))


def test_a_run_may_go_on_with_other_workers_or_another_strategy(tmp_path: Path) -> None:
    module = partial(Regression, ADAM)
    whole, _ = fit("hybrid", 1, 12, module, max_epochs=4)
    ours = str(saved("hybrid", 3, 4, module, tmp_path / "ours"))
    theirs = str(saved("ddp_fork", 2, 6, module, tmp_path / "theirs"))
    for strategy, workers, batch, path in [
        ("hybrid", 2, 6, ours),
        ("ddp_fork", 2, 6, ours),
        ("hybrid", 4, 3, theirs),
    ]:
        resumed, _ = fit(strategy, workers, batch, module, ckpt_path=path, max_epochs=4)
        assert distance(resumed, whole) < 1e-6


def test_trap_07_schedules_and_groups_survive(tmp_path: Path) -> None:
    def schedule(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    module = partial(Regression, ADAM, schedule)
    path = saved("hybrid", 2, 6, module, tmp_path)
    group = torch.load(path, weights_only=True)["optimizer_states"][0]["param_groups"][0]
    assert group["lr"] == pytest.approx(0.01 / 4)
    resumed, _ = fit("hybrid", 2, 6, module, ckpt_path=str(path), max_epochs=4)
    whole, _ = fit("hybrid", 2, 6, module, max_epochs=4)
    assert torch.equal(flat(resumed), flat(whole))


def test_an_async_run_resumes(tmp_path: Path) -> None:
    module = partial(Regression, ADAM)
    path = saved("async", 2, 6, module, tmp_path)
    _, trainer = fit("async", 3, 6, module, ckpt_path=str(path), max_epochs=4)
    assert trainer.global_step == 32  # 4 epochs of 8 mini-batches
    assert trainer.strategy.run_stats()["samples"] == 96


class Placed(DataLoader[Any]):
    """Knows its place, as a ``StatefulDataLoader`` does."""

    skipped = place = 0

    def __iter__(self) -> Any:
        first, self.skipped, self.place = self.skipped, 0, self.skipped
        for n, batch in enumerate(super().__iter__()):
            if n >= first:
                self.place += 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skipped = state["place"]


@pytest.mark.parametrize(
    ("strategy", "n"), by_default([("hybrid", 2), ("async", 2), ("async", 1)], ("async", 2))
)
def test_a_loader_that_knows_its_place_loses_no_sample(
    strategy: str, n: int, tmp_path: Path
) -> None:
    def train(ckpt_path: Path | None = None, **options: Any) -> int:
        trainer = make_trainer(strategy, n, max_epochs=1, **options)
        loader = Placed(regression_data(), batch_size=4, shuffle=True)
        trainer.fit(Regression(), loader, ckpt_path=ckpt_path)
        return int(trainer.strategy.run_stats()["samples"])

    steps = 4 if strategy == "hybrid" else 8
    keep = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=steps)
    assert train(max_steps=steps, callbacks=[keep], enable_checkpointing=True) == 32
    assert train(tmp_path / "last.ckpt") == 16


class Failing(Regression):
    """Worker 1 fails in its fourth mini-batch, once."""

    fails = True

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.fails and self.global_rank == 1 and batch_idx == 3:
            raise LookupError("on purpose")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("n", by_default([2, 3], 2, 3))
def test_a_loader_that_knows_its_place_loses_no_sample_of_a_step_that_was_broken_off(
    n: int, tmp_path: Path
) -> None:
    """Its place is that of what has been fetched, and of other shares."""

    def train(workers: int, module: Failing, ckpt_path: Path | None = None) -> int:
        options = {"enable_checkpointing": True, "default_root_dir": tmp_path}
        trainer = make_trainer("hybrid", workers, max_epochs=1, **options)
        loader = Placed(regression_data(), batch_size=4, shuffle=True)
        trainer.fit(module, loader, ckpt_path=ckpt_path)
        return int(trainer.strategy.run_stats()["samples"])

    module = Failing()
    with pytest.raises(LookupError, match="on purpose"):
        train(2, module)
    module.fails = False
    assert train(n, module, next(tmp_path.rglob("interrupted.ckpt"))) == 48 - 3 * 2 * 4


def test_weights_and_moments_of_a_checkpoint_in_mid_epoch_belong_together(tmp_path: Path) -> None:
    """Adam's step count in the file equals the number of updates behind the weights."""
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
    fit(
        "async",
        3,
        4,
        partial(Regression, ADAM),
        max_epochs=2,
        callbacks=[checkpoint],
        enable_checkpointing=True,
    )
    for path in tmp_path.glob("*.ckpt"):
        content = torch.load(path, weights_only=True)
        states = content["optimizer_states"][0]["state"].values()
        assert {int(state["step"]) for state in states} == {content["global_step"]}
