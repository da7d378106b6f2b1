"""Workers that train on their own and die: the others go on, and every sample counts once."""

from __future__ import annotations

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
def test_every_sample_counts_once(name: str, choice: str, step: int, tmp_path: Path) -> None:
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


def test_in_lock_step_the_others_would_wait_for_its_steps(tmp_path: Path) -> None:
    strategy = HybridStrategy("hybrid", exchange="movement", on_failure="restart")
    trainer = make_trainer(strategy, 2, max_epochs=1, default_root_dir=tmp_path)
    with pytest.raises(ValueError, match=r"on_failure=restart.*wait for the steps"):
        trainer.fit(Regression(), DataLoader(regression_data(), SIZE))
