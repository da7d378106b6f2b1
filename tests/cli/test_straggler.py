"""A slow worker on purpose, and training that stops at a target."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridtrain.cli.straggler import Straggler
from hybridtrain.errors import UserError
from tests.cli.conftest import Command, summary
from tests.cli.tiny import TINY
from tests.picking import by_default


@pytest.mark.parametrize(
    ("rank", "times", "sleeps"), [(1, 3.0, True), (0, 3.0, False), (1, 1.0, False)]
)
def test_only_the_last_worker_sleeps_in_proportion_to_its_work(
    rank: int, times: float, sleeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    clock = iter([10.0, 10.5, 20.0, 20.25])
    monkeypatch.setattr(time, "process_time", lambda: next(clock) * torch.get_num_threads())
    monkeypatch.setattr(time, "sleep", slept.append)
    trainer: Any = SimpleNamespace(global_rank=rank, world_size=2)
    straggler: Any = Straggler(times)
    straggler.on_train_batch_start(trainer, None, None, 0)
    straggler.on_train_batch_start(trainer, None, None, 1)
    straggler.on_validation_end(trainer, None)
    straggler.on_train_batch_start(trainer, None, None, 0)
    straggler.on_train_batch_start(trainer, None, None, 1)
    assert slept == ([2 * 0.5, 2 * 0.25] if sleeps else [])


def test_a_straggler_that_would_be_faster_is_refused(command: Command) -> None:
    with pytest.raises(UserError, match=r"times=0\.5"):
        Straggler(0.5)
    result = command("task=digits", "experiment=to_target", "target.slower=0.5")
    assert result.code == 2 and "times=0.5" in result.complaint


@pytest.mark.parametrize("strategy", by_default(["hybrid", "async"], "async"))
def test_training_stops_at_the_target_and_everybody_with_it(
    command: Command, strategy: str
) -> None:
    options = [
        "task=own",
        "experiment=to_target",
        "target.value=1",
        "task.monitor=val/size",
        "task.mode=max",
    ]
    options += ["trainer.devices=2", f"strategy={strategy}", "hydra.run.dir=here"]
    result = command(*TINY[:2], TINY[3], *options)
    assert (result.code, result.err) == (0, "")
    assert summary("here")["samples"] == 24, "one epoch: more than 1 is reached at once"
    assert Path("here/history.csv").is_file()
