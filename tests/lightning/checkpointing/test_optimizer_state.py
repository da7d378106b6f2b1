"""``optimizer.state`` is what one process would have: to look at, to change, to save by hand."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lightning.step.test_optimizers import compare
from tests.lightning.toys import Regression, fit
from tests.picking import by_default

OPTIM = torch.optim
KINDS = {
    "flat": partial(OPTIM.Adam, lr=0.01),
    "whole": partial(OPTIM.SGD, lr=0.01, momentum=0.9),
}


class Monitor(Regression):
    """Logs how large the moments are, and how many parameters have any."""

    def __init__(self, make: Any, folder: Path) -> None:
        super().__init__(make)
        self.folder = folder
        self.seen: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        optimizer = self.optimizers().optimizer
        for state in optimizer.state.values():
            self.seen += [float(t.float().norm()) for t in state.values() if t is not None]
        self.seen.append(len(optimizer.state_dict()["state"]))
        self.seen.append(float(self.net[0].weight in optimizer.state))

    def on_train_end(self) -> None:
        torch.save(torch.tensor(self.seen), self.folder / f"{self.global_rank}.pt")


@pytest.mark.parametrize("name", KINDS)
def test_the_optimizer_state_that_user_code_reads_is_that_of_one_process(
    name: str, tmp_path: Path
) -> None:
    seen = {}
    for strategy, workers in (("auto", 1), ("hybrid", 2)):
        folder = tmp_path / strategy
        folder.mkdir()
        module = partial(Monitor, KINDS[name], folder)
        fit(strategy, workers, 12 // workers, module, overfit_batches=1.0, max_epochs=2)
        seen[strategy] = [torch.load(path) for path in sorted(folder.iterdir())]
    assert len(seen["auto"][0]) > 8
    assert torch.equal(*seen["hybrid"])
    torch.testing.assert_close(seen["hybrid"][0], seen["auto"][0])


def halve(optimizer: Any) -> None:
    for state in optimizer.state.values():
        for name in ("exp_avg", "momentum_buffer"):
            if name in state:
                state[name].mul_(0.5)


def start_anew(optimizer: Any) -> None:
    optimizer.state = defaultdict(dict)


def forget_one(optimizer: Any) -> None:
    optimizer.state.pop(optimizer.param_groups[0]["params"][0])


def load_back(optimizer: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def look(optimizer: Any) -> None:
    assert optimizer.state[torch.nn.Parameter(torch.zeros(1))] == {}


class Meddling(Regression):
    def __init__(self, make: Any, meddle: Any) -> None:
        super().__init__(make)
        self.meddle = meddle

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.meddle(self.optimizers().optimizer)


@pytest.mark.parametrize(
    "meddle", by_default([halve, start_anew, forget_one, load_back], load_back)
)
@pytest.mark.parametrize("name", KINDS)
def test_changes_that_user_code_makes_to_the_optimizer_state_count(
    name: str, meddle: Any, tmp_path: Path
) -> None:
    compare(partial(Meddling, KINDS[name], meddle), tmp_path, max_epochs=3)


def test_what_is_changed_after_the_last_step_is_saved(tmp_path: Path) -> None:
    class AtTheEnd(Regression):
        def on_train_epoch_end(self) -> None:
            halve(self.optimizers().optimizer)

    compare(partial(AtTheEnd, KINDS["whole"]), tmp_path)


def test_free_running_workers_may_read_and_change_the_optimizer_state() -> None:
    _, trainer = fit("async", 2, 6, partial(Meddling, KINDS["flat"], halve))
    assert trainer.global_step == 24


def test_reading_an_optimizer_state_that_is_not_there_changes_nothing(tmp_path: Path) -> None:
    class Rank0(Meddling):
        def on_train_epoch_start(self) -> None:
            if self.global_rank == 0:
                look(self.optimizers().optimizer)

    looked, _ = fit("hybrid", 2, 6, partial(Rank0, KINDS["flat"], look))
    plain, _ = fit("hybrid", 2, 6, partial(Regression, KINDS["flat"]))
    assert all(map(torch.equal, looked.parameters(), plain.parameters()))
