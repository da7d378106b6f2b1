"""SLURM warns a job by a signal before it ends it: a checkpoint, and the job is queued again."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from hybridtrain.lightning.checkpointing.slurm_requeue import Requeue
from tests.lightning.toys import Regression, make_trainer, regression_data
from tests.picking import by_default

AT = 3  # the mini-batch in which the signal comes


class Warned(Regression):
    """SLURM signals all processes of a job step, or the first alone."""

    everybody = True
    at: int | None = AT

    def __init__(self) -> None:
        super().__init__(lambda p: torch.optim.Adam(p, lr=0.01))

    def _warn(self, batch_idx: int) -> None:
        if batch_idx == self.at and self.global_rank == 0:
            self._warn_the_parent()
        if batch_idx == self.at and self.everybody:
            os.kill(os.getpid(), signal.SIGUSR1)

    def _warn_the_parent(self) -> None:
        """It notes the signal a moment later, on a busy machine perhaps after the last batch."""
        listening = [each for each in self.trainer.callbacks if isinstance(each, Requeue)]
        before = [each._warned.shared.map[:] for each in listening]
        os.kill(os.getppid(), signal.SIGUSR1)
        until = time.monotonic() + 20
        while before and before == [each._warned.shared.map[:] for each in listening]:
            assert time.monotonic() < until, "the parent has not noted the signal"
            time.sleep(0.001)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self._warn(batch_idx)
        return super().training_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._warn(batch_idx)


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A SLURM whose ``scontrol`` writes down what it is asked."""
    told, program = tmp_path / "told", tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {told}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    slurm = {"NTASKS": "1", "JOB_NAME": "train", "NODEID": "0", "PROCID": "0", "LOCALID": "0"}
    for name, value in (slurm | {"JOB_ID": "77"}).items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    return told


def train(folder: Path, strategy: str, at: int | None, everybody: bool = True) -> Any:
    module = Warned()
    module.at, module.everybody = at, everybody
    trainer = make_trainer(strategy, 2, max_epochs=2, default_root_dir=folder)
    trainer.fit(module, DataLoader(regression_data(), 4, shuffle=True))
    return trainer


@pytest.mark.parametrize("everybody", by_default([True, False], False))
@pytest.mark.parametrize("strategy", ["hybrid", "async"])
def test_a_warning_saves_and_requeues_and_training_goes_on(
    strategy: str, everybody: bool, queue: Path, tmp_path: Path
) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    trainer = train(tmp_path, strategy, AT, everybody)
    assert signal.getsignal(signal.SIGUSR1) == before
    assert trainer.current_epoch == 2, "until SLURM ends it"
    assert set(queue.read_text().splitlines()) == {"requeue 77"}
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=True)
    assert 0 < saved["global_step"] < trainer.global_step


def test_workers_that_train_on_their_own_are_not_made_to_average(
    queue: Path, tmp_path: Path
) -> None:
    """One worker saves alone: what is saved are the masters as they are, without a step so far."""
    trainer = train(tmp_path, "local_sgd", AT)
    assert trainer.strategy.run_stats()["updates"] == 2, "at the ends of the epochs"
    assert torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=True)["global_step"] == 0


def test_the_job_that_is_started_again_goes_on_from_there(queue: Path, tmp_path: Path) -> None:
    train(tmp_path, "hybrid", AT)
    saved = torch.load(tmp_path / "hpc_ckpt_2.ckpt", weights_only=True)  # one in each epoch
    trainer = train(tmp_path, "hybrid", None)
    assert trainer.strategy.run_stats()["updates"] == 12 - saved["global_step"]
    assert trainer.global_step == 12


def test_a_warning_in_a_test_ends_nothing(queue: Path, tmp_path: Path) -> None:
    module = Warned()
    trainer = make_trainer("hybrid", 2, default_root_dir=tmp_path)
    trainer.test(module, DataLoader(regression_data(), 4), verbose=False)
    assert queue.read_text() == "requeue 77\n"
