"""Under async each worker makes its own updates, one by one, and nobody sees half of one."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from hybridtrain import HybridStrategy
from hybridtrain.engine.memory import Store
from hybridtrain.engine.memory.counters import MadeSteps
from hybridtrain.engine.protocol.messages import MadeStep, Push
from hybridtrain.engine.server.server import ParameterServer
from hybridtrain.engine.updates.flat.lent_state import LentFlatUpdate
from tests.lightning.async_training.test_untold_steps import Count, Indices
from tests.lightning.step.test_shared_rounds import (
    CASES,
    STEPS,
    UNUSUAL,
    by_the_server,
    trained,
)
from tests.lightning.toys import make_trainer
from tests.picking import by_default
from tests.support.ends import first

ALONE = {name: case for name, case in CASES.items() if "n" not in case}


def use_async(case: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {**case, "n": 1, "strategy": HybridStrategy("async", **options)}


@pytest.fixture
def made(monkeypatch: Any) -> Counter[bool]:
    """How many updates workers have made themselves, and how many the server."""
    seen, on = Counter[bool](), ParameterServer.on

    def counted(server: ParameterServer, event: Any) -> Any:
        if isinstance(push := getattr(event, "message", None), Push) and push.weight > 0:
            own = isinstance(push, MadeStep)
            seen[own] += 1 + len(push.former) if own else 1
        return on(server, event)

    monkeypatch.setattr(ParameterServer, "on", counted)
    return seen


@pytest.mark.few(1)
@pytest.mark.parametrize("case", by_default(ALONE, "Adam", "schedule", "accumulated"))
def test_updates_that_one_worker_makes_itself_have_the_bits_of_the_servers(
    case: str, made: Counter[bool]
) -> None:
    mine = trained(**use_async(ALONE[case]))
    n_own, n_asked = made[True], made[False]
    theirs = by_the_server(**use_async(ALONE[case]))
    for a, b in zip(mine.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(a, b)
    a, b = mine.strategy.run_stats(), theirs.strategy.run_stats()
    same = ("updates", "samples", "samples_per_worker", "staleness", "handed_over", "dropped")
    assert {key: a[key] for key in same} == {key: b[key] for key in same}
    assert mine.global_step == theirs.global_step == n_own + n_asked
    assert n_asked == 1, "the first makes the state"


@pytest.mark.parametrize("what", UNUSUAL)
def test_unusual_updates_are_made_by_the_server_with_the_same_bits(
    what: str, made: Counter[bool]
) -> None:
    options = {"make": lambda p: torch.optim.SGD(p, lr=0.01), **UNUSUAL[what]}
    mine = trained(**use_async(options))
    assert 2 <= made[False] < STEPS < made[True]
    theirs = by_the_server(**use_async(options))
    for a, b in zip(mine.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("policy", ["hybrid", "async"])
def test_an_update_that_is_given_by_name_is_made_by_the_server(
    policy: str, made: Counter[bool]
) -> None:
    """Workers know only the user's own optimizer."""
    update = {"name": "sgd", "lr": 0.01, "momentum": 0.9}
    trainer = trained(2, strategy=HybridStrategy(policy, update=update))
    assert not made[True] and made[False] >= trainer.strategy.run_stats()["updates"]


def test_workers_make_their_updates_themselves_in_a_recorded_run_as_well(
    made: Counter[bool], tmp_path: Path
) -> None:
    trained(**use_async({}, record=tmp_path / "record"))
    assert made[False] == 1 and made[True] == 2 * STEPS - 1


class Level(Count):
    """All elements are moved alike, so that half an update would be seen."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        least, most = self.counts.detach().aminmax()
        assert least == most, "half of an update"
        return -self.counts.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def test_no_worker_computes_with_half_an_update(
    made: Counter[bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refreshed, refresh = list[int](), Store.refresh

    def noted(store: Store, worker: int) -> None:
        refreshed.append(worker)
        refresh(store, worker)

    monkeypatch.setattr(Store, "refresh", noted)
    module = Level(3 * 2**16 + 7, tmp_path)
    trainer = make_trainer("async", 3, max_epochs=1)
    trainer.fit(module, DataLoader(Indices(600), 2))
    alone = torch.nn.Parameter(torch.zeros(1))
    adam = torch.optim.Adam([alone], lr=0.01)
    for _ in range(300):  # always the same gradient: the order of the workers makes no difference
        alone.grad = -torch.ones(1)
        adam.step()
    assert made[False] <= 3, "each worker has a first"
    assert len(refreshed) < 20, "the server touches no copy that somebody computes with"
    assert torch.allclose(module.counts.detach(), alone.detach(), rtol=1e-6)
    stats = trainer.strategy.run_stats()
    histogram = stats["staleness"]["histogram"]
    assert stats["updates"] == sum(histogram.values()) == 300 and max(histogram) >= 1


class Everywhere(Count):
    """Each update adds 0.01 to every element, whatever the mini-batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return -self.counts.sum() * len(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01, betas=(0.0, 0.0), eps=0.0)


@pytest.mark.few(2)
@pytest.mark.parametrize("last", by_default([1, 2, 3, 50, 299, 300, 301], 1, 50, 300, 301))
def test_no_update_is_made_behind_the_last(last: int, made: Counter[bool], tmp_path: Path) -> None:
    module = Everywhere(1000, tmp_path)
    trainer = make_trainer("async", 3, max_steps=last, max_epochs=1)
    trainer.fit(module, DataLoader(Indices(600), 2))
    stats, n = trainer.strategy.run_stats(), min(last, 300)
    assert stats["updates"] == trainer.global_step == n
    assert torch.allclose(module.counts.detach(), torch.full((1000,), 0.01 * n), rtol=1e-5)
    assert made[True] >= n - 6 and sum(stats["dropped"]) <= 2


class Gaps(Count):
    """Now and then a worker has no gradient for one of two parameters."""

    def __init__(self, n: int, path: Path) -> None:
        super().__init__(n, path)
        self.more = torch.nn.Parameter(torch.zeros(n))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx % 10 == 3 else loss - self.more[batch].mean()


def test_each_sample_counts_once_whoever_makes_the_update(
    made: Counter[bool], tmp_path: Path
) -> None:
    module, n = Gaps(1200, tmp_path), 2
    trainer = make_trainer("async", n, max_epochs=1)
    trainer.fit(module, DataLoader(Indices(1200), 2))
    assert set(module.counts.tolist()) == {0.5}
    assert set(module.more.tolist()) == {0.0, 0.5}
    stats = trainer.strategy.run_stats()
    assert (stats["updates"], stats["samples"]) == (600, 1200)
    assert 58 <= made[False] <= 64 and made[True] == 600 - made[False]


def n_steps(lent: LentFlatUpdate) -> int:
    return int(lent.update.count_groups.all[0].figures["step"])


def dies(patch: Any, when: str, flag: Path) -> None:
    """Once, a worker is killed in the 40th update."""

    def die() -> None:
        if first(flag):
            os.kill(os.getpid(), signal.SIGKILL)

    keep, make = LentFlatUpdate.keep, MadeSteps.make

    def kept(lent: LentFlatUpdate) -> None:
        keep(lent)
        if when == "before" and n_steps(lent) == 40:
            die()

    def counted(made: MadeSteps, worker: int, covered: int) -> None:
        if when == "in the middle" and made.total == 40:
            die()
        make(made, worker, covered)
        if when == "behind" and made.total == 41:
            die()

    patch.setattr(LentFlatUpdate, "keep", kept)
    patch.setattr(MadeSteps, "make", counted)


@pytest.mark.few(1)
@pytest.mark.parametrize("when", ["before", "in the middle", "behind"])
@pytest.mark.parametrize("on_failure", by_default(["restart", "continue"], "restart"))
def test_a_killed_worker_leaves_a_whole_update_or_none(
    when: str, on_failure: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dies(monkeypatch, when, tmp_path / "killed")
    module = Everywhere(5000, tmp_path)
    trainer = make_trainer(HybridStrategy("async", on_failure=on_failure), 2, max_epochs=1)
    trainer.fit(module, DataLoader(Indices(400), 2))
    assert (tmp_path / "killed").exists()
    stats = trainer.strategy.run_stats()
    assert stats["updates"] == trainer.global_step == 200 and stats["samples"] == 400
    assert torch.allclose(module.counts.detach(), torch.full((5000,), 2.0), rtol=1e-5)
    trainer.save_checkpoint(path := tmp_path / "last.ckpt")
    state = torch.load(path, weights_only=True)["optimizer_states"][0]["state"][0]
    assert float(state["step"]) == 200


def test_a_worker_stopped_in_an_update_is_killed_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keep, flag = LentFlatUpdate.keep, tmp_path / "stopped"

    def stops(lent: LentFlatUpdate) -> None:
        keep(lent)
        if n_steps(lent) == 40 and first(flag):
            os.kill(os.getpid(), signal.SIGSTOP)

    monkeypatch.setattr(LentFlatUpdate, "keep", stops)
    module = Everywhere(5000, tmp_path)
    strategy = HybridStrategy("async", on_failure="continue", hang_timeout_s=2.0)
    began_s = time.monotonic()
    trainer = make_trainer(strategy, 2, max_epochs=1)
    trainer.fit(module, DataLoader(Indices(400), 2))
    assert flag.exists() and time.monotonic() - began_s < 60
    assert trainer.strategy.run_stats()["updates"] == 200
    assert torch.allclose(module.counts.detach(), torch.full((5000,), 2.0), rtol=1e-5)
