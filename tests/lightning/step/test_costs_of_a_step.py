"""What a step costs beside its arithmetic, in exact numbers: who changes one says why.

Times differ from machine to machine. Messages, bells, and bytes that are copied do not.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
from torch.utils.data import DataLoader

from hybridtrain import HybridStrategy
from hybridtrain.engine.protocol.messages import name_of
from hybridtrain.engine.worlds.channel import Channel
from tests.lightning.toys import Regression, make_trainer, regression_data

STEPS = range(3, 7)  # of worker 0, between its first and its last mini-batches
PARAMETERS = 4 * 16 + 16 + 16 + 1


class Counted(pl.Callback):
    """Counts what this worker sends and hears, and how often it rings, step by step."""

    def __init__(self, path: Path) -> None:
        self.path, self.counts, self.steps = path, Counter[str](), list[Counter[str]]()

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        line, ring = trainer.strategy.client.line, os.eventfd_write
        assert isinstance(line, Channel)
        send, receive = line.send, line.receive

        def sent(message: Any, *more: Any) -> None:
            self.counts[name_of(message)] += 1
            send(message, *more)

        def received() -> Any:
            message, fd = receive()
            self.counts[name_of(message)] += 1
            return message, fd

        def rung(*arguments: Any) -> None:
            self.counts["bells"] += 1
            ring(*arguments)

        line.send, line.receive = sent, received  # type: ignore[method-assign]
        os.eventfd_write = rung

    def on_train_batch_start(self, *_: Any) -> None:
        self.steps.append(self.counts.copy())

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank == 0:
            self.path.write_text(json.dumps(self.steps))


def counted(
    strategy: HybridStrategy, workers: int, samples: int, folder: Path, steps: range
) -> list[dict[str, int]]:
    """What worker 0 says, hears and rings in each of these steps of an epoch."""
    callback = Counted(folder / "steps.json")
    trainer = make_trainer(strategy, workers, callbacks=[callback], max_epochs=1)
    trainer.fit(Regression(), DataLoader(regression_data(samples), 4))
    sums = [Counter(each) for each in json.loads(callback.path.read_text())]
    return [dict(sums[n + 1] - sums[n]) for n in steps]


ONE_EACH_WAY = {"Push": 1, "Released": 1, "bells": 1}
EXPECTED: dict[str, tuple[Any, dict[str, int]]] = {
    "hybrid": ("hybrid", ONE_EACH_WAY),  # where the server makes the updates
    "async": ("async", ONE_EACH_WAY),  # so, too; the next mini-batch is drawn with the push
    "ssp": ({"name": "ssp", "lead": 1}, ONE_EACH_WAY),
    "synchronous": ("synchronous", {**ONE_EACH_WAY, "Begin": 1, "Released": 2, "bells": 2}),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", EXPECTED)
def test_a_step_is_one_message_each_way(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    policy, expected = EXPECTED[name]
    monkeypatch.setattr("hybridtrain.lightning.launcher.workers_may_update", lambda strategy: False)
    found = counted(HybridStrategy(policy), 2, 160, tmp_path, STEPS)
    assert found == [expected] * len(STEPS)


def test_workers_in_lock_step_ring_once_for_each_other_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Who comes last makes the update; nothing is sent."""
    monkeypatch.setattr("hybridtrain.engine.worker.makers.last_worker.PATIENCE_S", 60.0)
    found = counted(HybridStrategy("hybrid"), 3, 240, tmp_path, range(5, 16))
    assert [each for each in found if each not in ({}, {"bells": 2})] == []


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["hogwild", "async"])
def test_workers_that_step_the_masters_tell_of_many_steps_together(
    policy: str, monkeypatch: Any, tmp_path: Path
) -> None:
    """As many as half of the mini-batches that were drawn at once; fewer near the end."""
    monkeypatch.setattr("hybridtrain.engine.worker.makers.in_place._TELL_S", 1e9)
    found = counted(HybridStrategy(policy), 1, 800, tmp_path, range(3, 100))
    told = [n for n, each in enumerate(found) if each.get("Push")]
    assert all(set(each) <= set(ONE_EACH_WAY) for each in found), "nothing else is said"
    assert len(told) <= 15 and max(b - a for a, b in pairwise(told)) >= 16


def test_workers_that_train_on_their_own_say_nothing_between_two_exchanges(tmp_path: Path) -> None:
    strategy = HybridStrategy("hybrid", exchange={"name": "movement", "every": 4})
    found = counted(strategy, 2, 160, tmp_path, range(3, 11))
    assert found == [ONE_EACH_WAY, {}, {}, {}] * 2


@pytest.mark.parametrize(("policy", "rows"), [("hybrid", 1), ("async", 1), ("hogwild", 0)])
def test_what_is_handed_over_is_one_gradient_or_none(policy: str, rows: int) -> None:
    trainer = make_trainer(policy, 2, max_epochs=1)
    trainer.fit(Regression(), DataLoader(regression_data(160), 4))
    stats = trainer.strategy.run_stats()
    pushes = 40
    first = 2 if rows == 0 else 0  # under hogwild the server makes the first step of each
    handed = stats["handed_over"]["sent_bytes"] / (4 * PARAMETERS)
    assert handed == pytest.approx(rows * pushes, abs=first)
