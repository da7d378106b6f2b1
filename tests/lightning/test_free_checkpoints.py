"""ModelCheckpoint where workers run freely and see other steps: one writes, and all know what."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import Checkpoint, ModelCheckpoint
from torch.utils.data import DataLoader

from hybridtrain import HybridStrategy
from tests.lightning.toys import Manual, Regression, fit, regression_data

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

    def __init__(self, late: int, validates: bool) -> None:
        super().__init__(lambda parameters: torch.optim.Adam(parameters, lr=0.01))
        self.late, self.validates, self.slept = late, validates, False
        self.callbacks: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.strategy.local_rank == self.late and not self.slept:
            self.slept = True
            time.sleep(0.6)
        return super().training_step(batch, batch_idx)

    def val_dataloader(self) -> Any:
        return DataLoader(regression_data(8), batch_size=4) if self.validates else []

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


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize(
    ("policy", "on_failure"), [("async", "stop"), ("async", "restart"), ("hogwild", "stop")]
)
def test_all_know_what_was_saved_whichever_steps_they_saw(
    policy: str, on_failure: str, late: int, how: str, tmp_path: Path
) -> None:
    (folder := tmp_path / "known").mkdir()
    callback = ModelCheckpoint(tmp_path / "kept", filename="{step}", **HOW[how])
    _, trainer = fit(
        HybridStrategy(policy, on_failure=on_failure, hang_timeout_s=None),
        2,
        4,
        Late(late, how in ("val", "waits", "epochs")),
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


@pytest.mark.parametrize("checkpoint", ["blocking", "background"])
@pytest.mark.parametrize("policy", ["async", "hybrid"])
def test_the_modules_own_callbacks_are_taken_care_of_too(
    policy: str, checkpoint: str, tmp_path: Path
) -> None:
    (folder := tmp_path / "known").mkdir()
    module = Late(0, validates=True)
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


def steps_of(folder: Path) -> list[int]:
    """In the names of the files there."""
    return sorted(int(path.stem.removeprefix("step=")) for path in folder.iterdir())


class Growing(Regression):
    """The first validation has one sample, for worker 0."""

    def val_dataloader(self) -> Any:
        n = 1 if self.trainer.current_epoch == 0 else 8
        return DataLoader(regression_data(n), batch_size=1)


def test_who_rests_in_a_validation_knows_that_what_waited_for_it_is_saved(tmp_path: Path) -> None:
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
