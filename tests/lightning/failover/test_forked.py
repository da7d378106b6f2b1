"""User code of a worker forks, and the child raises: training goes on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from tests.lightning.toys import Regression, make_trainer, regression_data


class Forking(Regression):
    """Forks in a step of one worker, and the child raises."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 1 and self.global_rank == 1:
            if (pid := os.fork()) == 0:
                raise ValueError("in the fork")
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            (self.folder / "status").write_text(str(status))
        return super().training_step(batch, batch_idx)


class Witness(pl.Callback):
    """Writes down which processes have heard of an exception."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_exception(self, *_: Any) -> None:
        (self.folder / "told").touch()


def test_a_run_goes_on_though_a_child_of_a_worker_raises(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer("hybrid", 2, max_epochs=1, callbacks=[Witness(tmp_path)])
    trainer.fit(Forking(tmp_path), DataLoader(regression_data(16), 4))
    assert trainer.global_step == 2
    assert (tmp_path / "status").read_text() == "1" and not (tmp_path / "told").exists()
    assert capfd.readouterr().err.count("ValueError: in the fork") == 1
