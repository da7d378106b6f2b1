"""Whoever fails, and however: a run that ends early leaves a checkpoint of its last update."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch.utils.data import DataLoader, Dataset

from hybridtrain import HybridStrategy
from hybridtrain.engine.worlds.worker_exit import WorkerError
from hybridtrain.lightning.checkpointing.periodic import PeriodicCheckpoint
from tests.lightning.toys import Regression, make_trainer, regression_data
from tests.picking import by_default

AT = 3  # the mini-batch in which a worker fails
ADAM = partial(torch.optim.Adam, lr=0.01)


class Failing(Regression):
    """Workers fail in their own ways, if at all."""

    def __init__(self, ways: dict[int, str]) -> None:
        super().__init__(ADAM)
        self.ways = ways

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        way = self.ways.get(self.global_rank, "") if batch_idx == AT else ""
        if way == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if way == "raise":
            raise LookupError("on purpose")
        if way == "exit":
            sys.exit(3)
        return super().training_step(batch, batch_idx)


def fail(
    folder: Path, ways: dict[int, str], policy: str = "hybrid", workers: int = 3, **options: Any
) -> tuple[Failing, pl.Trainer]:
    """Train until it fails; checkpoints go to ``folder``."""
    module = options.pop("made", Failing)(ways)
    callbacks = [ModelCheckpoint(folder), *options.pop("callbacks", [])]
    trainer = make_trainer(
        HybridStrategy(policy, **options), workers, callbacks=callbacks, enable_checkpointing=True
    )
    loader = DataLoader(regression_data(), batch_size=2, shuffle=True)
    with warnings.catch_warnings(), pytest.raises((LookupError, WorkerError)):
        warnings.simplefilter("ignore")
        trainer.fit(module, loader)
    return module, trainer


def saved(path: Path) -> dict[str, Any]:
    """A checkpoint, which is of one update."""
    content: dict[str, Any] = torch.load(path, weights_only=True)
    states = content["optimizer_states"][0]["state"].values()
    assert {int(state["step"]) for state in states} == {content["global_step"]}
    return content


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "ways",
    by_default(
        [
            {0: "die"},
            {0: "raise"},
            {0: "exit"},
            {1: "die"},
            {1: "raise"},
            {1: "exit"},
            {0: "die", 1: "raise"},
            {0: "raise", 2: "die"},
            {0: "die", 1: "die", 2: "raise"},
            dict.fromkeys(range(3), "raise"),
        ],
        {0: "die"},
        {0: "raise"},
        {1: "exit"},
        {0: "raise", 2: "die"},
    ),
    ids=lambda ways: "-".join(f"{who}-{way}" for who, way in ways.items()),
)
def test_the_last_checkpoint_of_a_failed_lock_step_run_is_of_the_step_before(
    ways: dict[int, str], tmp_path: Path
) -> None:
    fail(tmp_path, ways)
    assert saved(tmp_path / "interrupted/interrupted.ckpt")["global_step"] == AT


@pytest.mark.parametrize("ways", [{0: "die"}, {0: "raise"}, dict.fromkeys(range(3), "raise")])
def test_a_failed_run_of_free_running_workers_leaves_a_checkpoint_of_the_updates_made(
    ways: dict[int, str], tmp_path: Path
) -> None:
    fail(tmp_path, ways, "async")
    assert saved(tmp_path / "interrupted/interrupted.ckpt")["global_step"] > 0


class OthersSlow(Failing):
    """All but worker 0 are in the midst of a mini-batch when it fails."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank > 0:
            time.sleep(0.2)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    "policy",
    ["async", *(pytest.param(p, marks=pytest.mark.slow) for p in ("ssp", "k_async", "hogwild"))],
)
def test_the_last_checkpoint_of_free_running_workers_has_all_counted_updates(
    policy: str, tmp_path: Path
) -> None:
    _, trainer = fail(tmp_path, {0: "raise"}, policy, made=OthersSlow)
    stats = cast(Any, trainer.strategy).run_stats()
    assert saved(tmp_path / "interrupted/interrupted.ckpt")["global_step"] == stats["updates"] > 0


def test_a_worker_that_is_alone_saves_before_it_says_that_it_has_failed(tmp_path: Path) -> None:
    fail(tmp_path, {0: "raise"}, workers=1)
    assert saved(tmp_path / "interrupted/interrupted.ckpt")["global_step"] == AT


def test_the_first_remaining_worker_saves_the_last_checkpoint_if_too_few_are_left(
    tmp_path: Path,
) -> None:
    fail(tmp_path, {0: "die"}, on_failure="continue", min_workers=3)
    assert saved(tmp_path / "interrupted/interrupted.ckpt")["global_step"] == AT


@pytest.mark.parametrize("on_failure", ["continue", "restart"])
def test_a_last_checkpoint_is_saved_even_if_all_workers_fail(
    on_failure: str, tmp_path: Path
) -> None:
    fail(tmp_path, dict.fromkeys(range(3), "raise"), on_failure=on_failure)
    assert saved(tmp_path / "interrupted/interrupted.ckpt")["global_step"] == AT


class FailingOnce(Failing):
    """Worker 1 raises, as often as a file says that it has not yet."""

    mark = Path()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and batch_idx == AT and not self.mark.exists():
            self.mark.touch()
            raise LookupError("on purpose")
        return Regression.training_step(self, batch, batch_idx)


@pytest.mark.parametrize("policy", by_default(["hybrid", "async"], "hybrid"))
@pytest.mark.parametrize("on_failure", ["continue", "restart"])
def test_a_worker_that_raises_does_not_end_those_who_go_on(
    on_failure: str, policy: str, tmp_path: Path
) -> None:
    module = FailingOnce({})
    module.mark = tmp_path / "raised"
    strategy = HybridStrategy(policy, on_failure=on_failure)
    keep = ModelCheckpoint(tmp_path)
    trainer = make_trainer(strategy, 3, callbacks=[keep], enable_checkpointing=True, max_epochs=2)
    trainer.fit(module, DataLoader(regression_data(), batch_size=2, shuffle=True))
    assert module.mark.exists() and trainer.current_epoch == 2
    assert trainer.strategy.run_stats()["samples"] == 2 * 48
    assert not (tmp_path / "interrupted/interrupted.ckpt").exists()


class Broken(Dataset[Any]):
    """Worker 1 cannot read what comes after its third mini-batch, which it has offered."""

    def __init__(self) -> None:
        self.data, self.left = regression_data(), AT * 2

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.left -= os.environ.get("LOCAL_RANK") == "1"
        if self.left < 0:
            raise OSError("unreadable")
        return self.data[index]


class Slow(Regression):
    """In the others' third mini-batch there is time for worker 1 to fail."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank != 1 and batch_idx == AT - 1 and self.trainer.current_epoch == 0:
            time.sleep(0.5)
        return super().training_step(batch, batch_idx)


class Goodbye(pl.Callback):
    """Writes down what a worker's callbacks hear."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        (self.folder / f"goodbye-{trainer.strategy.global_rank}").write_text(repr(exception))


def read_on(folder: Path, on_failure: str) -> pl.Trainer:
    """Train with it."""
    strategy, told = (
        HybridStrategy(on_failure=on_failure),
        [ModelCheckpoint(folder), Goodbye(folder)],
    )
    trainer = make_trainer(strategy, 3, callbacks=told, enable_checkpointing=True, max_epochs=2)
    trainer.fit(Slow(ADAM), DataLoader(Broken(), batch_size=2, shuffle=True))
    return trainer


def test_the_others_go_on_without_a_worker_that_cannot_read_its_next_mini_batch(
    tmp_path: Path,
) -> None:
    trainer = read_on(tmp_path, "continue")
    assert trainer.current_epoch == 2
    assert trainer.strategy.run_stats()["samples"] == 2 * 48
    assert "unreadable" in (tmp_path / "goodbye-1").read_text()


def test_a_worker_that_cannot_read_its_next_mini_batch_has_made_the_step(tmp_path: Path) -> None:
    """It has awaited the release of the step before it fetches."""
    with pytest.raises(OSError, match="unreadable"):
        read_on(tmp_path, "stop")
    assert saved(tmp_path / "interrupted/interrupted.ckpt")["global_step"] == AT


class FailingLate(Failing):
    """Worker 0 fails when the update has been made and before Lightning has counted it."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        left = [AT]

        def hook(*_: Any) -> None:
            left[0] -= 1
            if left[0] < 0 and self.global_rank == 0:
                raise LookupError("after the update")

        optimizer.register_step_post_hook(hook)
        return optimizer


def test_a_worker_that_has_not_counted_an_update_leaves_the_last_checkpoint_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "Failing", FailingLate)
    fail(tmp_path, {})
    assert saved(tmp_path / "interrupted/interrupted.ckpt")["global_step"] == AT + 1


@pytest.mark.few(1)
@pytest.mark.parametrize("ways", [{0: "raise"}, {1: "raise"}, {0: "die"}])
def test_a_callback_that_saves_on_failure_keeps_what_was_trained(
    ways: dict[int, str], tmp_path: Path
) -> None:
    fail(tmp_path, ways, callbacks=[OnExceptionCheckpoint(tmp_path, "failed")])
    assert saved(tmp_path / "failed.ckpt")["global_step"] == AT


def test_the_calling_process_has_nothing_to_save_and_says_so(tmp_path: Path) -> None:
    module, trainer = fail(tmp_path, {1: "raise"})
    with pytest.warns(UserWarning, match=r"no checkpoint is written to .*mine\.ckpt"):
        trainer.save_checkpoint(tmp_path / "mine.ckpt")
    assert not (tmp_path / "mine.ckpt").exists()
    module.ways = {}
    trainer.fit(module, DataLoader(regression_data(), batch_size=2))
    trainer.save_checkpoint(tmp_path / "mine.ckpt")
    assert saved(tmp_path / "mine.ckpt")["global_step"] > 0


def test_the_heir_knows_which_files_are_to_be_deleted_one_day(tmp_path: Path) -> None:
    periodic = PeriodicCheckpoint(tmp_path, every_updates=1, keep=2)
    fail(tmp_path, {0: "die"}, callbacks=[periodic])
    callbacks = saved(tmp_path / "interrupted/interrupted.ckpt")["callbacks"]
    names = {Path(name).name for name in callbacks[periodic.state_key]["files"]}
    assert names == {f"periodic-{AT - 1}.ckpt", f"periodic-{AT}.ckpt"}


def test_the_last_checkpoint_does_not_lie_in_the_folder_of_callbacks_checkpoints(
    tmp_path: Path,
) -> None:
    """Lightning's code and users' lists that folder."""
    fail(tmp_path / "checkpoints", {1: "raise"}, workers=2)
    assert saved(tmp_path / "interrupted.ckpt")["global_step"] == AT
    assert not list((tmp_path / "checkpoints").glob("*"))
    module = Regression(ADAM)
    trainer = make_trainer("hybrid", 2)
    trainer.fit(
        module, DataLoader(regression_data(), batch_size=2), ckpt_path=tmp_path / "interrupted.ckpt"
    )
    assert trainer.global_step == 36


def test_a_failed_fast_dev_run_leaves_no_checkpoint(tmp_path: Path) -> None:
    options = {"enable_checkpointing": True, "fast_dev_run": AT + 1}
    trainer = make_trainer("hybrid", 2, callbacks=[ModelCheckpoint(tmp_path)], **options)
    with pytest.raises(LookupError, match="on purpose"):
        trainer.fit(Failing({1: "raise"}), DataLoader(regression_data(), batch_size=2))
    assert not any(tmp_path.iterdir())


def test_the_calling_process_has_no_optimizers_to_give_a_state_to(tmp_path: Path) -> None:
    fail(tmp_path, {1: "raise"}, workers=2)
    checkpoint = saved(tmp_path / "interrupted/interrupted.ckpt")
    strategy = make_trainer("hybrid", 2).strategy
    assert checkpoint["optimizer_states"]
    strategy.load_optimizer_state_dict(checkpoint)  # as Lightning's strategies: nothing happens
