"""Workers that train on their own and die: the others go on, and every sample counts once."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from hybridtrain import HybridStrategy
from tests.lightning.toys import Recorder, Regression, make_trainer, regression_data
from tests.picking import by_default

N, EPOCHS, SIZE = 240, 3, 4
SCHEMES: dict[str, dict[str, Any]] = {
    "easgd": {"policy": "async", "exchange": {"name": "elastic", "every": 4}},
    "downpour": {"policy": "async", "exchange": {"name": "accumulated", "n_push": 3}},
    "overlapped": {
        "policy": "async",
        "exchange": {"name": "accumulated", "n_push": 2, "fetch": "overlapped"},
    },
    "async_diloco": {
        "policy": {"name": "grace", "window_s": 0.01},
        "exchange": {"name": "movement", "every": 4},
    },
}


class Slow(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.005)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("name", by_default(SCHEMES, "easgd"))
@pytest.mark.parametrize("choice", by_default(["continue", "restart"], "restart"))
@pytest.mark.parametrize("step", by_default([0, 2, 5], 2))
def test_every_sample_counts_once_when_a_worker_that_trains_on_its_own_is_lost(
    name: str, choice: str, step: int, tmp_path: Path
) -> None:
    """The steps since its last exchange are lost with a worker, and others do them again.

    A worker that is through with its part of an epoch goes round once more for what was given back;
    it must have handed over what it has trained on by then.
    """
    data = Recorder(regression_data(N))
    fault = {"worker": 1, "step": step, "kind": "kill"}
    strategy = HybridStrategy(**SCHEMES[name], on_failure=choice, faults=[fault])
    trainer = make_trainer(strategy, 3, max_epochs=EPOCHS, default_root_dir=tmp_path)
    trainer.fit(Slow(), DataLoader(data, SIZE))
    assert strategy.run_stats()["samples"] == EPOCHS * N
    every = SCHEMES[name]["exchange"].get("every", 3)
    assert int(data.counts.min()) >= EPOCHS
    assert int(data.counts.sum()) <= EPOCHS * N + (every + 2) * SIZE  # what it had not handed over


class DiesLast(Regression):
    """Worker 1 dies with its third mini-batch when the others are through with all that is left."""

    def __init__(self, data: Recorder) -> None:
        super().__init__()
        self.counts = data.counts

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and batch_idx == 2 and self.current_epoch == 0:
            deadline = time.monotonic() + 60
            while int(self.counts.sum()) < N and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.5)  # they step with the last of it, and come to the epoch's end
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("name", by_default(SCHEMES, "async_diloco"))
def test_a_worker_that_takes_over_samples_of_a_lost_one_repeats_none_of_its_own(
    name: str, tmp_path: Path
) -> None:
    data = Recorder(regression_data(N))
    strategy = HybridStrategy(**SCHEMES[name], on_failure="continue")
    trainer = make_trainer(strategy, 3, max_epochs=1, default_root_dir=tmp_path)
    trainer.fit(DiesLast(data), DataLoader(data, SIZE))
    assert strategy.run_stats()["samples"] == N
    lost = 4 * SIZE  # at most: what the lost worker had drawn and not handed over, one ahead
    assert N < int(data.counts.sum()) <= N + lost


def test_restarting_workers_that_train_on_their_own_in_lock_step_is_refused(tmp_path: Path) -> None:
    strategy = HybridStrategy("hybrid", exchange="movement", on_failure="restart")
    trainer = make_trainer(strategy, 2, max_epochs=1, default_root_dir=tmp_path)
    with pytest.raises(ValueError, match=r"on_failure=restart.*wait for the steps"):
        trainer.fit(Regression(), DataLoader(regression_data(), SIZE))
