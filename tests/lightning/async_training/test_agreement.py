"""Workers that run freely see other steps and clocks, and yet decide alike where they meet."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import Callback, Checkpoint, EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader

from hybridtrain import HybridStrategy
from tests.lightning.toys import Manual, Regression, fit, regression_data
from tests.picking import but_slow, by_default, rotated

STATE = (
    "_last_global_step_saved",
    "_last_checkpoint_saved",
    "_defer_save_until_validation",
    "best_k_models",
    "kth_best_model_path",
    "kth_value",
    "best_model_score",
    "best_model_path",
    "current_score",
    "last_model_path",
)


class Late(Regression):
    """One worker's first step takes longer than all of the other's."""

    def __init__(self, late: int, validation: int = 0) -> None:
        super().__init__(lambda parameters: torch.optim.Adam(parameters, lr=0.01))
        self.late, self.validation, self.slept = late, validation, False
        self.callbacks: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.strategy.local_rank == self.late and not self.slept:
            self.slept = True
            time.sleep(0.6)
        return super().training_step(batch, batch_idx)

    def val_dataloader(self) -> Any:
        return DataLoader(regression_data(n), batch_size=4) if (n := self.validation) else []

    def configure_callbacks(self) -> Any:
        return self.callbacks


class Remember(Checkpoint):
    """The last of the callbacks: writes down what each worker's ModelCheckpoint knows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        known = [{name: vars(x)[name] for name in STATE} for x in kept(trainer)]
        torch.save(known, self.folder / f"{trainer.strategy.local_rank}.pt")


def kept(trainer: Any) -> list[ModelCheckpoint]:
    return [x for x in trainer.checkpoint_callbacks if isinstance(x, ModelCheckpoint)]


HOW: dict[str, dict[str, Any]] = {
    "steps": {"every_n_train_steps": 5, "save_last": True},
    "all": {"every_n_train_steps": 5, "save_top_k": -1, "save_last": True},
    "link": {"every_n_train_steps": 5, "save_top_k": -1, "save_last": "link"},
    "best": {"monitor": "train/loss", "every_n_train_steps": 1, "save_top_k": 2, "save_last": True},
    "val": {"monitor": "val/loss", "every_n_train_steps": 5, "save_top_k": 2, "save_last": True},
    "waits": {"monitor": "val/loss", "every_n_train_steps": 5, "save_on_train_epoch_end": False},
    "epochs": {"monitor": "val/loss", "save_top_k": 1, "save_last": True},
}


POLICIES = [("async", "stop"), ("async", "restart"), ("hogwild", "stop")]
CASES = [
    (*policy, late, how)
    for late in (0, 1)
    for number, how in enumerate(HOW)
    for policy in rotated(POLICIES, late + number)
]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("policy", "on_failure", "late", "how"), but_slow(CASES, lambda _, number: number % 17 > 0)
)
def test_all_workers_know_which_checkpoints_were_saved_whichever_steps_they_saw(
    policy: str, on_failure: str, late: int, how: str, tmp_path: Path
) -> None:
    (folder := tmp_path / "known").mkdir()
    callback = ModelCheckpoint(tmp_path / "kept", filename="{step}", **HOW[how])
    _, trainer = fit(
        HybridStrategy(policy, on_failure=on_failure, hang_timeout_s=None),
        2,
        4,
        Late(late, 8 if how in ("val", "waits", "epochs") else 0),
        max_epochs=2,
        callbacks=[callback, Remember(folder)],
        enable_checkpointing=True,
    )
    assert trainer.global_step == 24
    ours, others = (torch.load(folder / f"{n}.pt", weights_only=True) for n in range(2))
    assert ours == others
    files = [torch.load(path, weights_only=True) for path in (tmp_path / "kept").iterdir()]
    assert files and all(content["state_dict"] for content in files)
    assert Path(callback.last_model_path).exists()


@pytest.mark.parametrize("checkpoint", by_default(["blocking", "background"], "background"))
@pytest.mark.parametrize("policy", by_default(["async", "hybrid"], "hybrid"))
def test_the_modules_own_callbacks_are_taken_care_of_too(
    policy: str, checkpoint: str, tmp_path: Path
) -> None:
    (folder := tmp_path / "known").mkdir()
    module = Late(0, validation=8)
    keep = ModelCheckpoint(tmp_path / "kept", filename="{step}", **HOW["val"])
    module.callbacks = [keep, Remember(folder)]
    strategy = HybridStrategy(policy, checkpoint=checkpoint)
    _, trainer = fit(strategy, 2, 4, module, max_epochs=2, enable_checkpointing=True)
    ours, others = (torch.load(folder / f"{n}.pt", weights_only=True) for n in range(2))
    assert ours == others
    found = trainer.checkpoint_callback
    assert isinstance(found, ModelCheckpoint) and Path(found.last_model_path).exists()
    assert Path(found.best_model_path).exists()


class Stepping(Manual, Regression):
    """By hand."""


@pytest.mark.parametrize("make", [Regression, Stepping])
def test_a_multiple_that_another_worker_has_made_is_saved_at_the_next_step(
    make: Any, tmp_path: Path
) -> None:
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    # Workers take turns: worker 0 makes the first step of an epoch of twelve, and every other one.
    _, trainer = fit("synchronous", 2, 4, make, callbacks=[keep], enable_checkpointing=True)
    assert trainer.global_step == 36
    assert steps_of(tmp_path) == [5, 9, 13, 17, 21, 25, 29, 33]
    assert type(keep._every_n_train_steps) is int, "nothing of ours is left behind"


def test_a_run_that_goes_on_saves_at_the_next_multiple(tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path / "a", filename="{step}", every_n_train_steps=7, save_top_k=-1)
    fit("synchronous", 2, 4, callbacks=[keep], enable_checkpointing=True, max_epochs=1)
    assert steps_of(tmp_path / "a") == [7]
    keep = ModelCheckpoint(tmp_path / "b", filename="{step}", every_n_train_steps=4, save_top_k=-1)
    path = str(tmp_path / "a" / "step=7.ckpt")
    fit("synchronous", 2, 4, ckpt_path=path, callbacks=[keep], enable_checkpointing=True)
    assert steps_of(tmp_path / "b")[0] in (8, 9)


class Stop(Callback):
    """As a clock does, which is not the same in all workers."""

    def __init__(self, who: int, at: int) -> None:
        self.who, self.at = who, at

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if trainer.strategy.local_rank == self.who and done >= self.at:
            trainer.should_stop = trainer.current_epoch > 0


STOPS = [
    (*policy, who, validation)
    for n, policy in enumerate([*POLICIES, ("ssp", "continue"), ("synchronous", "stop")])
    for m, who in enumerate([0, 1])
    for validation in rotated([1, 8, 0], n + m)  # with one sample there is nothing for worker 1
]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("policy", "on_failure", "who", "validation"),
    but_slow(STOPS, lambda _, number: number % 29 > 0),
)
def test_one_worker_that_wants_to_stop_stops_all_workers(
    policy: str, on_failure: str, who: int, validation: int, tmp_path: Path
) -> None:
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    _, trainer = fit(
        HybridStrategy(policy, on_failure=on_failure),
        2,
        4,
        Late(1 - who, validation),
        callbacks=[Stop(who, 2), keep],
        enable_checkpointing=True,
    )
    assert trainer.current_epoch == 2 and trainer.should_stop
    saved = max(tmp_path.iterdir(), key=lambda path: int(path.stem.removeprefix("step=")))
    resumed = fit(policy, 2, 4, Late(0), ckpt_path=str(saved), max_epochs=3)[1]
    assert resumed.current_epoch == 3


@pytest.mark.parametrize(
    ("policy", "on_failure"),
    by_default([*POLICIES, ("ssp", "continue")], ("ssp", "continue")),
)
def test_max_time_ends_all_workers(policy: str, on_failure: str) -> None:
    _, trainer = fit(
        HybridStrategy(policy, on_failure=on_failure),
        2,
        4,
        max_epochs=-1,
        max_time={"seconds": 1},
    )
    assert trainer.should_stop and trainer.current_epoch > 0


class Behind(Regression):
    """One worker begins an epoch when others have ended theirs."""

    def __init__(self, who: int) -> None:
        super().__init__()
        self.who = who

    def on_train_epoch_start(self) -> None:
        if self.trainer.strategy.local_rank == self.who:
            time.sleep(0.3)


@pytest.mark.parametrize("who", by_default([0, 1], 0))
@pytest.mark.parametrize(
    ("policy", "on_failure"),
    by_default([("async", "restart"), ("hogwild", "stop")], ("async", "restart")),
)
def test_a_worker_without_a_mini_batch_in_an_epoch_disturbs_no_checkpoint_or_early_stopping(
    policy: str, on_failure: str, who: int, tmp_path: Path
) -> None:
    keep = ModelCheckpoint(tmp_path, monitor="train/loss", save_top_k=2, save_last=True)
    _, trainer = fit(
        HybridStrategy(policy, on_failure=on_failure),
        2,
        4,
        Behind(who),
        callbacks=[keep, EarlyStopping("train/loss", patience=5)],
        enable_checkpointing=True,
    )
    assert trainer.global_step == 36


def steps_of(folder: Path) -> list[int]:
    """In the names of the files there."""
    return sorted(int(path.stem.removeprefix("step=")) for path in folder.iterdir())


class Growing(Regression):
    """The first validation has one sample, for worker 0."""

    def val_dataloader(self) -> Any:
        n = 1 if self.trainer.current_epoch == 0 else 8
        return DataLoader(regression_data(n), batch_size=1)


def test_a_worker_that_rests_in_a_validation_knows_that_the_delayed_checkpoint_is_saved(
    tmp_path: Path,
) -> None:
    keep = ModelCheckpoint(
        tmp_path,
        filename="{step}",
        monitor="val/loss",
        every_n_train_steps=5,
        save_top_k=-1,
        save_on_train_epoch_end=False,
    )
    fit(
        "hybrid",
        2,
        4,
        Growing,
        callbacks=[keep],
        enable_checkpointing=True,
        max_epochs=2,
        reload_dataloaders_every_n_epochs=1,
    )
    assert steps_of(tmp_path) == [6, 10]  # at 5 there was no metric yet
