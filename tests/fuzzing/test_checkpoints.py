"""Checkpoints with right checksums that make no sense: refused in one line, or trained from."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from hybridtrain.cli.run import keeping_whole
from hybridtrain.cli.validation.checkpoint_checks import check_checkpoint
from hybridtrain.lightning.checkpointing.checkpoint_content import Restoration
from tests.cli.tiny import TinyData, TinyModule
from tests.fuzzing.mutations import EXTREMES, damaged, faults, swapped
from tests.lightning.toys import make_trainer

OTHERS = [*EXTREMES, torch.zeros(0), torch.full((2, 3), float("nan")), torch.tensor(5)]
HOW = ("capturable", "fused", "foreach", "differentiable")
COUNTS = {"epoch", "global_step", "ready", "started", "processed", "completed", "last_epoch"}


class Scheduled(TinyModule):
    """With moments, and a rate that falls."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3)]


def trainer(folder: Path, **options: Any) -> pl.Trainer:
    saving = pl.callbacks.ModelCheckpoint(folder / "checkpoints", save_last=True)
    made: pl.Trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saving],
        **options,
    )
    return made


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a checkpoint that two workers have left in the middle of an epoch."""
    folder = tmp_path_factory.mktemp("saved")
    saving = pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)
    made = make_trainer("hybrid", 2, max_epochs=1, callbacks=[saving], enable_checkpointing=True)
    made.fit(Scheduled(), datamodule=TinyData())
    (path,) = folder.glob("*step=4.ckpt")
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


@pytest.mark.parametrize(
    "n", [25, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_a_checkpoint_is_trained_from_or_refused_in_one_line(
    n: int, content: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "x.ckpt"
    torch.save(content, path)
    good = path.read_bytes()
    warnings.simplefilter("ignore")

    def case(draw: random.Random, number: int) -> None:
        where = ""
        if number % 4:
            where, changed = swapped(content, draw, OTHERS)
            if any(f"'{flag}'" in where for flag in HOW):
                return  # which optimizers refuse by themselves, on one device and not on another
            torch.save(changed, path)
        else:
            path.write_bytes(damaged(good, draw))
        check_checkpoint(path, Scheduled())
        name, _, value = where.partition(" := ")
        counts = any(f"'{each}')" in name for each in COUNTS)
        good_count = value.strip("'").isdigit() or "object object" in value
        assert not counts or good_count, f"accepted: {where}"
        made = trainer(tmp_path, max_epochs=2)
        Restoration(made)
        with keeping_whole(made):
            made.fit(Scheduled(), datamodule=TinyData(), ckpt_path=path, weights_only=True)

    ends, found = faults(case, n, "checkpoints")
    assert not found, f"{dict(ends)}\n" + "\n".join(found[:5])
