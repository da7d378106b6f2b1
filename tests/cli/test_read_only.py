"""A directory that turns read-only while a run is in it: every loss is a line, none a traceback."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.conftest import Command
from tests.cli.tiny import TINY, TinyModule
from tests.picking import by_default


class Closing(TinyModule):
    """Takes the right to write to ``here`` away, at a certain point."""

    def __init__(self, at: str, **options: Any) -> None:
        super().__init__(**options)
        self.at = at

    def _close(self, now: str) -> None:
        if now == self.at and self.global_rank == 0:
            for folder, _, _ in os.walk("here"):
                Path(folder).chmod(0o555)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == 6:
            self._close("middle")
        return super().training_step(batch, batch_idx)

    def on_fit_end(self) -> None:
        self._close("end of training")

    def on_test_start(self) -> None:
        self._close("test")


@pytest.mark.parametrize("at", by_default(["middle", "end of training", "test"], "middle"))
def test_a_directory_that_turns_read_only_costs_files_and_no_traceback(
    command: Command, ordinary_user: None, at: str
) -> None:
    options = [*TINY[1:], "model._target_=tests.cli.test_read_only.Closing", "trainer.devices=2"]
    options += ["logger=both", "profile=true", "hydra.run.dir=here", f"model.at={at}"]
    done = command(*options, "callbacks.monitor.log_every_s=0", "trainer.log_every_n_steps=1")
    assert done.code == 1
    assert "Traceback" not in done.err
    assert "Failed after" in done.out and "test/n" in done.out and "updates" in done.out
    assert "hybridtrain: no summary.json (Permission denied)" in done.err
    assert "updates      12" in done.out, "though the monitor could leave no numbers"
