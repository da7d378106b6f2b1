"""Somebody logs, saves and shows the bar at any time, and nobody else does."""

from __future__ import annotations

from typing import Any

import pytest
from lightning_utilities.core.rank_zero import rank_zero_only
from pytorch_lightning.callbacks import TQDMProgressBar

from hybridtrain.lightning.failover.leader_failover import LeaderFailover
from tests.lightning.toys import Regression, make_trainer


class Second:
    """The client of worker 1."""

    worker, is_leader = 1, False
    on_change: Any = None

    def learn(self, is_leader: bool) -> None:
        """From the server."""
        self.is_leader = is_leader
        self.on_change()


class Bar(TQDMProgressBar):
    """Draws nothing, and counts how often training was begun in it."""

    begun = 0

    def on_train_start(self, *_: Any) -> None:
        self.begun += 1


def test_a_deputy_shows_the_bar_until_worker_0_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    client, bar = Second(), Bar()
    trainer = make_trainer("hybrid", 2, callbacks=[bar], enable_progress_bar=True)
    trainer.strategy.connect(Regression())
    bar.disable()
    LeaderFailover(trainer, client)  # type: ignore[arg-type]
    seen = []
    for is_leader in (False, True, True, False, False, True):
        client.learn(is_leader)
        seen.append((bar.is_enabled, bar.begun, rank_zero_only.rank))
    assert seen == [
        (False, 0, 1),
        (True, 1, 0),
        (True, 1, 0),
        (False, 1, 1),
        (False, 1, 1),
        (True, 2, 0),
    ]
