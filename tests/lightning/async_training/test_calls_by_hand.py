"""A schedule that user code steps by hand counts the calls of all workers, as on one device."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader

from tests.lightning.toys import Regression, distance, fit, regression_data
from tests.picking import but_slow, by_default
from tests.support.ends import wait_until

# One update for each mini-batch.
EACH = ("synchronous", "async", "hogwild", "ssp", "grace")
FREE = (*EACH, "backup", "k_async", "k_batch_sync", "k_batch_async", "softsync")
BATCHES, EPOCHS, GAMMA = 12, 2, 0.95


class ByHand(Regression):
    """Steps its schedules ``where``; ``n`` optimizers use every mini-batch one behind the other."""

    def __init__(self, where: str, n: int = 1, schedule: Any = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.where, self.n = where, n
        self.make = schedule or partial(ExponentialLR, gamma=GAMMA)

    def call(self, *args: Any) -> None:
        schedules = self.lr_schedulers()
        for schedule in schedules if isinstance(schedules, list) else [schedules]:
            schedule.step(*args)

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizers = self.optimizers()
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()
        due = {
            "batch": True,
            "metric": True,
            "third": batch_idx % 3 == 2,
            "last": self.where == "last" and self.trainer.is_last_batch,
        }
        if due.get(self.where):
            self.call(*[torch.tensor(1.0)] * (self.where == "metric"))

    def on_train_batch_end(self, *_: Any) -> None:
        if self.where == "batch end":
            self.call()

    def on_train_epoch_end(self) -> None:
        if self.where == "epoch":
            self.call()

    def on_validation_epoch_end(self) -> None:
        if self.where == "validation" and not self.trainer.sanity_checking:
            self.call()

    def val_dataloader(self) -> Any:
        return DataLoader(regression_data(8), batch_size=4) if self.where == "validation" else []

    def configure_optimizers(self) -> Any:
        layers = [self.net[0], self.net[2]][: self.n] if self.n > 1 else [self.net]
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in layers]
        return optimizers, [self.make(optimizer) for optimizer in optimizers]


def saved(trainer: pl.Trainer, folder: Path) -> tuple[list[int], list[float], list[float]]:
    """Calls of each schedule, its rates, and the rates of its optimizer, in a checkpoint."""
    trainer.save_checkpoint(folder / "last.ckpt")
    return counted(folder / "last.ckpt")


def counted(path: Path) -> tuple[list[int], list[float], list[float]]:
    found = torch.load(path, weights_only=False)
    schedules = found["lr_schedulers"]
    rates = [state["param_groups"][0]["lr"] for state in found["optimizer_states"]]
    return [s["last_epoch"] for s in schedules], [s["_last_lr"][0] for s in schedules], rates


TIMES = {
    "batch": BATCHES * EPOCHS,
    "batch end": BATCHES * EPOCHS,
    "epoch": EPOCHS,
    "validation": EPOCHS,
    "last": EPOCHS,
}


@pytest.mark.few(2)
@pytest.mark.parametrize("workers", by_default([2, 3], 2))
@pytest.mark.parametrize(
    ("strategy", "where"),
    but_slow(
        [(strategy, where) for strategy in FREE for where in TIMES],
        lambda case, n: (
            case
            not in [
                ("synchronous", "batch"),
                ("async", "batch"),
                ("hogwild", "batch end"),
                ("backup", "batch"),
                ("async", "validation"),
                ("ssp", "last"),
            ]
        ),
    ),
)
def test_calls_of_all_workers_add_up(
    tmp_path: Path, strategy: str, where: str, workers: int
) -> None:
    _, trainer = fit(strategy, workers, 4, lambda: ByHand(where), max_epochs=EPOCHS)
    calls, rates, used = saved(trainer, tmp_path)
    assert calls == [TIMES[where]]
    assert rates == used == pytest.approx([0.01 * GAMMA ** TIMES[where]])


def test_schedules_stepped_by_hand_by_workers_in_turn_give_the_bits_of_one_worker() -> None:
    schedule = partial(ReduceLROnPlateau, patience=2, factor=0.5)
    for module in (lambda: ByHand("batch"), lambda: ByHand("metric", n=2, schedule=schedule)):
        one, two = (fit("synchronous", w, 4, module, max_epochs=EPOCHS)[0] for w in (1, 2))
        assert distance(one, two) == 0.0


@pytest.mark.parametrize("strategy", by_default(EACH, "async"))
def test_every_nth_mini_batch_at_which_a_schedule_is_stepped_is_counted_in_each_worker(
    tmp_path: Path, strategy: str
) -> None:
    _, trainer = fit(strategy, 2, 4, lambda: ByHand("third"), max_epochs=EPOCHS)
    (calls,), *_ = saved(trainer, tmp_path)
    assert BATCHES // 3 * EPOCHS - EPOCHS <= calls <= BATCHES // 3 * EPOCHS


@pytest.mark.parametrize("strategy", by_default(EACH, "async"))
def test_each_of_several_optimizers_has_a_count_of_schedule_calls_of_its_own(
    tmp_path: Path, strategy: str
) -> None:
    _, trainer = fit(strategy, 2, 4, lambda: ByHand("batch", n=2), max_epochs=EPOCHS)
    whole = 2 * BATCHES * EPOCHS
    if strategy == "ssp":  # gradients of workers that wait are merged
        assert trainer.global_step <= whole
    else:
        assert trainer.global_step == whole
    assert saved(trainer, tmp_path)[0] == [BATCHES * EPOCHS] * 2


@pytest.mark.parametrize("strategy", by_default(EACH, "async"))
def test_a_plateau_schedule_stepped_by_hand_gets_the_metric_of_each_call(
    tmp_path: Path, strategy: str
) -> None:
    module = partial(ByHand, "metric", schedule=partial(ReduceLROnPlateau, patience=3, factor=0.5))
    _, trainer = fit(strategy, 2, 4, module, max_epochs=EPOCHS)
    calls, rates, used = saved(trainer, tmp_path)
    assert calls == [BATCHES * EPOCHS]
    assert rates == used == pytest.approx([0.01 * 0.5**5])  # once in 4 calls, behind the first


class Late(ByHand):
    """The rate falls at calls 2 to 9, the last by worker 0; worker 1 pushes last, with an older."""

    def __init__(self, folder: Path) -> None:
        falls = partial(ReduceLROnPlateau, patience=0, factor=0.5, min_lr=0.01 * 0.5**8)
        super().__init__("metric", schedule=falls)
        self.folder, self.steps = folder, 0

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.steps += 1
        at = self.trainer.global_rank, self.steps
        for said, heard in (
            ((0, 1), (1, 1)),
            ((1, 1), (0, 1)),
            ((0, 7), (1, 4)),
            ((1, 4), (0, 9)),
            ((1, 3), (0, 7)),
        ):
            if at == said:  # each worker holds one mini-batch ahead
                (self.folder / f"{at}").touch()
                wait_until((self.folder / f"{heard}").exists)
        super().training_step(batch, batch_idx)
        if at == (0, 8):
            (self.folder / "(0, 9)").touch()


def test_a_checkpoint_has_the_plateaus_rate_though_a_push_behind_it_had_an_older(
    tmp_path: Path,
) -> None:
    _, trainer = fit("async", 2, 4, lambda: Late(tmp_path), max_epochs=1)
    calls, rates, used = saved(trainer, tmp_path)
    assert calls == [BATCHES]
    assert rates == used == [0.01 * 0.5**8]


class Plateau(Regression):
    """A schedule that Lightning steps with a metric, behind every mini-batch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        schedule = ReduceLROnPlateau(optimizer)
        config = {"scheduler": schedule, "interval": "step", "monitor": "train/loss"}
        return {"optimizer": optimizer, "lr_scheduler": config}


@pytest.mark.parametrize("strategy", by_default(FREE, "async", "backup"))
@pytest.mark.parametrize("options", by_default([{}, {"max_steps": 5, "max_epochs": -1}], {}))
def test_a_metric_of_every_update_is_followed_by_all(
    tmp_path: Path, strategy: str, options: dict[str, Any]
) -> None:
    _, trainer = fit(strategy, 2, 4, Plateau, **({"max_epochs": EPOCHS} | options))
    if strategy in EACH or not options:
        assert saved(trainer, tmp_path)[0] == [trainer.global_step]


@pytest.mark.parametrize("strategy", by_default(EACH, "synchronous", "async"))
def test_a_mini_batch_behind_the_last_step_calls_nothing(tmp_path: Path, strategy: str) -> None:
    module = partial(ByHand, "batch")
    _, trainer = fit(strategy, 2, 4, module, max_epochs=-1, max_steps=7)
    assert (trainer.global_step, saved(trainer, tmp_path)[0]) == (7, [7])


@pytest.mark.parametrize("workers", by_default([2, 3], 3))
def test_a_worker_that_sits_out_a_step_calls_as_the_others(workers: int) -> None:
    """In lock-step; the last mini-batch is too small for all."""

    class Step(Regression):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
            schedule = ExponentialLR(optimizer, GAMMA)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "interval": "step"},
            }

    data = regression_data(49)
    by_hand = fit("hybrid", workers, 4, partial(ByHand, "batch"), data, max_epochs=EPOCHS)[0]
    assert distance(by_hand, fit("hybrid", workers, 4, Step, data, max_epochs=EPOCHS)[0]) == 0.0


SCHEDULES = {
    "falls": partial(ExponentialLR, gamma=GAMMA),
    "comes back": partial(LambdaLR, lr_lambda=lambda step: (1.0, 0.5, 0.25)[step % 3]),
    "one cycle": partial(OneCycleLR, max_lr=0.01, total_steps=2 * BATCHES * EPOCHS),
}


class Scheduled(ByHand):
    """By hand, or stepped by Lightning."""

    def __init__(self, by_hand: bool, schedule: Any) -> None:
        super().__init__("batch" if by_hand else "", schedule=schedule)
        self.automatic_optimization = not by_hand

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        chosen = Regression if self.automatic_optimization else ByHand
        return chosen.training_step(self, batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizers, (schedule,) = super().configure_optimizers()
        return optimizers, [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.few(2)
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize(
    ("strategy", "schedule"),
    but_slow(
        [(s, name) for s in ("hybrid", *FREE) for name in SCHEDULES],
        lambda case, n: case not in [("synchronous", "falls"), ("async", "comes back")],
    ),
)
@pytest.mark.parametrize("options", by_default([{}, {"max_steps": 17, "max_epochs": -1}], {}))
def test_rate_and_schedule_of_every_checkpoint_belong_together(
    tmp_path: Path, strategy: str, schedule: str, by_hand: bool, options: dict[str, Any]
) -> None:
    keep = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=1, save_last=True)
    settings = {"max_epochs": EPOCHS, "enable_checkpointing": True} | options
    module = partial(Scheduled, by_hand, SCHEDULES[schedule])
    fit(strategy, 2, 4, module, callbacks=[keep], **settings)
    for path in tmp_path.glob("*.ckpt"):
        steps, rates, used = counted(path)
        assert rates == used, path.name
        found = torch.load(path, weights_only=False)
        assert by_hand or steps == [found["global_step"]], path.name
