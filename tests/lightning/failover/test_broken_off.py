"""A step that is broken off has not been made, however far its worker has gone on meanwhile."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.optim import lr_scheduler as lrs
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hybridtrain.engine.step.hyper_parameters import HyperParameters
from hybridtrain.engine.worlds.worker_exit import WorkerDied
from tests.lightning.checkpointing.test_resume import same
from tests.lightning.toys import Regression, make_trainer, regression_data
from tests.picking import but_slow, by_default, rotated

ADAM = partial(torch.optim.Adam, lr=0.01)
BATCHES = 6  # of an epoch
HEAD_START_S = (
    0.3  # by which the others have offered their gradients, and wait at the next boundary
)


class Noisy(Regression):
    """With random numbers in it; worker ``who`` fails at its mini-batch ``at`` of all."""

    def __init__(
        self, at: int | None = None, schedule: Any = None, who: int = 1, dies: bool = False
    ) -> None:
        super().__init__(ADAM, schedule)
        self.net.insert(1, torch.nn.BatchNorm1d(16))
        self.net.append(torch.nn.Dropout(0.25))
        self.at, self.who, self.dies = at, who, dies

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        now = self.trainer.current_epoch * BATCHES + batch_idx
        if self.global_rank == self.who and self.at == now:
            time.sleep(HEAD_START_S)
            if self.dies:
                os.kill(os.getpid(), signal.SIGKILL)
            raise LookupError("broken off")
        return super().training_step(batch, batch_idx)


class Looking(Callback):
    """Has the worker wait for the release within its step."""

    def on_train_batch_end(self, *_: Any) -> None: ...


def run(
    folder: Path,
    make: Callable[[], Regression],
    ckpt_path: Path | None = None,
    data: Dataset[Any] | None = None,
    validation: int = 8,
    warned: Any = "ignore",
    num_workers: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """The last checkpoint, of three epochs of two workers."""
    keep = ModelCheckpoint(folder, save_last=True, filename="any")
    callbacks = [*options.pop("callbacks", []), keep]
    torch.manual_seed(7)
    options = {"max_epochs": 3, "callbacks": callbacks, "enable_checkpointing": True} | options
    module, trainer = make(), make_trainer("hybrid", 2, **options)
    loader = DataLoader(data or regression_data(44), 4, shuffle=True, num_workers=num_workers)
    held_out = DataLoader(regression_data(validation), batch_size=4) if validation else None
    with warnings.catch_warnings():
        warnings.simplefilter(warned)
        trainer.fit(module, loader, held_out, ckpt_path=ckpt_path)
    return torch.load(folder / "last.ckpt", weights_only=True)


def interrupted(folder: Path) -> dict[str, Any]:
    """The checkpoint of a run that has ended early; it is of one update."""
    saved: dict[str, Any] = torch.load(folder / "interrupted/interrupted.ckpt", weights_only=True)
    states = saved["optimizer_states"][0]["state"].values()
    assert {int(state["step"]) for state in states} == {saved["global_step"]}
    return saved


def assert_same(resumed: dict[str, Any], whole: dict[str, Any]) -> None:
    for checkpoint in (resumed, whole):  # gradients were cleared once more
        progress = checkpoint["loops"]["fit_loop"]
        del progress["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["zero_grad"]
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "loops"):
        assert same(resumed[part], whole[part]), part


def by_the_step(scheduler: Any) -> Any:
    return lambda optimizer: {"scheduler": scheduler(optimizer), "interval": "step"}


SCHEDULES: dict[str, Any] = {
    "none": None,
    "step": by_the_step(partial(lrs.ExponentialLR, gamma=0.9)),
    "cycle": by_the_step(partial(lrs.OneCycleLR, max_lr=0.1, total_steps=3 * BATCHES)),
    "epoch": partial(lrs.StepLR, step_size=1),
}
SCHEDULERS_ALONE: list[Callable[[Any], Any]] = [
    partial(lrs.LambdaLR, lr_lambda=lambda n: 0.9**n),
    partial(lrs.MultiplicativeLR, lr_lambda=lambda n: 0.9),
    partial(lrs.StepLR, step_size=2),
    partial(lrs.MultiStepLR, milestones=[4, 6]),
    partial(lrs.ConstantLR, total_iters=5),
    partial(lrs.LinearLR, total_iters=5),
    partial(lrs.ExponentialLR, gamma=0.9),
    partial(lrs.PolynomialLR, total_iters=20),
    partial(lrs.CosineAnnealingLR, T_max=7),
    partial(lrs.CosineAnnealingWarmRestarts, T_0=4),
    partial(lrs.CyclicLR, base_lr=0.1, max_lr=1.0, step_size_up=3),
    partial(lrs.OneCycleLR, max_lr=1.0, total_steps=20),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without validation": {"validation": 0},
    "accumulating": {"accumulate_grad_batches": 2},
    "validated after each": {"val_check_interval": 1},
    "validated within": {"val_check_interval": 3},
    "waiting in its step": {"callbacks": [Looking()]},
}
CASES = [("plain", name) for name in SCHEDULES] + [(name, "step") for name in OPTIONS][1:]


EVERY: list[Callable[[Any], Any]] = [
    *SCHEDULERS_ALONE,
    lambda o: lrs.SequentialLR(o, [lrs.ConstantLR(o), lrs.ExponentialLR(o, 0.9)], [2]),
    lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o), lrs.ExponentialLR(o, 0.9)]),
]


@pytest.mark.parametrize("make", EVERY)
def test_a_schedulers_steps_can_be_taken_back(make: Callable[[Any], Any]) -> None:
    """What ``state_dict`` returns is not a copy, but nothing in it is changed in place."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    scheduler = make(optimizer)
    optimizer.step()

    def rates(steps: int) -> list[float]:
        return [(scheduler.step(), optimizer.param_groups[0]["lr"])[1] for _ in range(steps)]

    rates(3)
    known, before = HyperParameters(optimizer), scheduler.state_dict()
    first = rates(6)
    scheduler.load_state_dict(before)
    known.put_back()
    assert rates(6) == first


PLACES = {"middle": 3, "first": 6, "again": 8, "last": 11}
BROKEN_OFF = [(*case, place) for n, case in enumerate(CASES) for place in rotated(list(PLACES), n)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "schedule", "place"), but_slow(BROKEN_OFF, lambda _, number: number % 37 > 0)
)
def test_a_run_resumed_from_a_step_that_was_broken_off_makes_that_step_again(
    options: str, schedule: str, place: str, tmp_path: Path
) -> None:
    make, at = partial(Noisy, schedule=SCHEDULES[schedule]), PLACES[place]
    whole = run(tmp_path / "whole", make, **OPTIONS[options])
    with pytest.raises(LookupError, match="broken off"):
        run(tmp_path / "broken", partial(make, at), **OPTIONS[options])
    accumulated = OPTIONS[options].get("accumulate_grad_batches", 1)
    assert interrupted(tmp_path / "broken")["global_step"] == at // accumulated
    path = tmp_path / "broken" / "interrupted/interrupted.ckpt"
    assert_same(run(tmp_path / "resumed", make, path, **OPTIONS[options]), whole)


@pytest.mark.parametrize(("who", "dies"), by_default([(0, False), (0, True), (1, True)], (1, True)))
@pytest.mark.parametrize("at", by_default([3, 11], 11))
def test_a_resumed_run_leaves_nothing_out_whichever_worker_failed_or_saved(
    who: int, dies: bool, at: int, tmp_path: Path
) -> None:
    make = partial(Noisy, schedule=SCHEDULES["step"])
    whole = run(tmp_path / "whole", make)
    with pytest.raises((LookupError, WorkerDied)):
        run(tmp_path / "broken", partial(make, at, who=who, dies=dies))
    assert interrupted(tmp_path / "broken")["global_step"] == at
    assert_same(
        run(tmp_path / "resumed", make, tmp_path / "broken" / "interrupted/interrupted.ckpt"),
        whole,
    )


class Interrupting(Dataset[Any]):
    """Ctrl-C while worker 1 fetches what comes after its first mini-batches."""

    def __init__(self, data: TensorDataset, after: int) -> None:
        self.data, self.left = data, after * 4

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        if os.environ.get("LOCAL_RANK") == "1":
            self.left -= 1
            if self.left == -1:
                time.sleep(HEAD_START_S)
                os.kill(os.getppid(), signal.SIGINT)
                time.sleep(HEAD_START_S)  # so that it is heard before the mini-batch begins
        return self.data[index]


@pytest.mark.parametrize("after", by_default([3, BATCHES], BATCHES))
def test_ctrl_c_while_one_worker_is_ahead_of_another_leaves_nothing_out(
    after: int, tmp_path: Path
) -> None:
    make = partial(Noisy, schedule=SCHEDULES["step"])
    whole = run(tmp_path / "whole", make)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit):
        run(tmp_path / "broken", make, data=Interrupting(regression_data(44), after))
    signal.signal(signal.SIGINT, handler)  # Lightning ignores the signal from then on
    assert interrupted(tmp_path / "broken")["global_step"] == after
    assert_same(
        run(tmp_path / "resumed", make, tmp_path / "broken" / "interrupted/interrupted.ckpt"),
        whole,
    )


def test_no_checkpoint_is_remembered_of_a_step_that_was_broken_off(tmp_path: Path) -> None:
    often: dict[str, Any] = {"every_n_train_steps": 1, "save_top_k": -1}
    # Who looks for a name that is free asks the others, and so hears of it.
    each = ModelCheckpoint(tmp_path, "{step}", "train/loss", enable_version_counter=False, **often)
    with pytest.raises(LookupError, match="broken off"):
        run(tmp_path, partial(Noisy, 8), callbacks=[each])
    (state,) = [
        state for key, state in interrupted(tmp_path)["callbacks"].items() if "train/loss" in key
    ]
    assert {Path(path).name for path in state["best_k_models"]} == {
        f"step={step}.ckpt" for step in range(1, 9)
    }
    assert all(Path(path).is_file() for path in state["best_k_models"])


class Forgetful(Callback):
    """Worker 1 fails before training begins."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if trainer.global_rank == 1:
            time.sleep(HEAD_START_S)
            raise LookupError("broken off")


@pytest.mark.slow
def test_a_run_that_goes_on_and_ends_before_it_begins_leaves_what_it_has_found(
    tmp_path: Path,
) -> None:
    whole = run(tmp_path / "whole", Noisy)
    path = tmp_path / "broken" / "interrupted/interrupted.ckpt"
    with pytest.raises(LookupError, match="broken off"):
        run(tmp_path / "broken", partial(Noisy, 8))
    first = path.stat().st_mtime_ns
    with pytest.raises(LookupError, match="broken off"):
        run(tmp_path / "broken", Noisy, path, callbacks=[Forgetful()])
    assert path.stat().st_mtime_ns > first, "it was written once more"
    assert_same(run(tmp_path / "resumed", Noisy, path), whole)


class InTheMiddle(Regression):
    """Worker 1 fails as the closure is evaluated for the second time in the second step."""

    def __init__(self) -> None:
        super().__init__(partial(torch.optim.LBFGS, lr=0.1, max_iter=6))
        self.evaluated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.evaluated.append(batch_idx)
        if self.global_rank == 1 and self.evaluated.count(1) == 2:
            time.sleep(HEAD_START_S)
            raise LookupError("broken off")
        return super().training_step(batch, batch_idx)


def test_no_checkpoint_is_written_in_the_middle_of_an_lbfgs_step_and_that_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # In workers, too, which pytest does not know of.
    monkeypatch.setattr(warnings, "showwarning", lambda text, *_, **__: print(text, flush=True))
    with pytest.raises(LookupError, match="broken off"):
        run(tmp_path, InTheMiddle, warned="always")
    assert "no checkpoint could be written to" in capfd.readouterr().out
    assert not (tmp_path / "interrupted/interrupted.ckpt").exists()
