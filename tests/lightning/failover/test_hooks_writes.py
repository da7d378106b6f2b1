"""What hooks and callbacks have written survives the loss of a worker."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EMAWeightAveraging
from torch.utils.data import DataLoader

from hybridtrain import HybridStrategy
from tests.lightning.failover.test_losses import Numbered
from tests.lightning.toys import Regression, distance, make_trainer

N, SIZE, MOST = 24, 3, 0.2


class Writing(Regression):
    """Keeps its parameters small; worker ``who`` is killed once, in this hook of an epoch."""

    def __init__(self, folder: Path, who: int | None, where: str, epoch: int, clamps: bool) -> None:
        super().__init__()
        self.double()
        self.register_buffer("ends", torch.zeros(1))
        self.folder, self.who, self.where, self.epoch = folder, who, where, epoch
        self.clamps = clamps

    def reach(self, where: str) -> None:
        mark = self.folder / "died"
        here = (self.global_rank, where, self.current_epoch) == (self.who, self.where, self.epoch)
        if here and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.reach(f"step {batch_idx}")
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.reach("behind a step")
        if self.clamps:
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.clamp_(-MOST, MOST)

    def on_validation_start(self) -> None:
        self.reach("validation")

    def on_train_epoch_end(self) -> None:
        self.reach("end of an epoch")


def run(
    folder: Path, who: int | None, where: str, epoch: int = 0, how: str = "restart", **options: Any
) -> Writing:
    pl.seed_everything(5, verbose=False)
    averages = options.pop("averages", False)
    module = Writing(folder, who, where, epoch, options.pop("clamps", False))
    strategy = HybridStrategy(policy="hybrid", on_failure=how)
    callbacks = [EMAWeightAveraging(decay=0.8)] if averages else []
    trainer = make_trainer(strategy, 2, max_epochs=2, callbacks=callbacks)
    loaders = [DataLoader(Numbered(N), SIZE), DataLoader(Numbered(8), 4)]
    trainer.fit(module, *loaders)
    assert who is None or (folder / "died").exists()
    return module


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("where", ["step 1", "behind a step"])
def test_a_restarted_worker_has_what_hooks_have_written_to_parameters(
    tmp_path: Path, who: int, where: str
) -> None:
    module = run(tmp_path, who, where, clamps=True)
    assert distance(module, run(tmp_path, None, "", clamps=True)) == 0.0


def test_who_speaks_for_a_lost_worker_0_hands_over_what_hooks_write(tmp_path: Path) -> None:
    module = run(tmp_path, 0, "step 1", how="continue", clamps=True)
    assert max(float(p.detach().abs().max()) for p in module.parameters()) <= MOST


@pytest.mark.parametrize(("who", "where"), [(0, "step 1"), (1, "step 1"), (0, "end of an epoch")])
def test_averaged_weights_are_those_of_an_undisturbed_run(
    tmp_path: Path, who: int, where: str
) -> None:
    module = run(tmp_path, who, where, 1, averages=True)
    assert distance(module, run(tmp_path, None, "", averages=True)) == 0.0


def test_others_validate_with_their_buffers_where_worker_0_is_lost_at_its_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    module = run(tmp_path, 0, "validation")
    assert distance(module, run(tmp_path, None, "")) == 0.0
    assert capfd.readouterr().err.count("restart ") == 1
