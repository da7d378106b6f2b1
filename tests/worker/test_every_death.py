"""A worker dies at any write to shared memory: nothing is lost, and nothing counts twice."""

from __future__ import annotations

import io
import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from tests.support.mortals import Model, Plan, tried

POLICIES = ("hybrid", "async", "hogwild")
ENDS = [*product(("restart", "continue"), (False, True))]  # on_failure; stopped first


def counts(model: Model) -> list[int]:
    """How many updates each sample is in: whole ones, or it is no such number."""
    moved = -model.server.store.master(model.layout.slots[0])[: model.size]  # type: ignore[union-attr]
    assert torch.allclose(moved, moved.round(), atol=1e-4), moved
    return [int(each) for each in moved.round()]


def judge(model: Model) -> None:
    """Parameters, state and counts are those of the updates that there must have been."""
    plan, server = model.plan, model.server
    seen, stats, n = counts(model), server.statistics.stats(), model.size
    if plan.policy == "hybrid" and plan.on_failure == "continue":
        for worker in range(plan.workers):
            own = seen[worker :: plan.workers]
            assert own == sorted(own, reverse=True), "all up to the step of its death"
            assert own[0] <= 1 and (own[-1] == 1 or worker in model.died)
    elif plan.policy == "hogwild":  # without a lock: a step may be made and not counted
        assert min(seen) == 1 and sum(seen) <= n + len(plan.deaths)
    else:
        assert set(seen) == {1}, seen
    counted, unmade = (n, sum(stats["dropped"])) if plan.policy == "hogwild" else (sum(seen), 0)
    assert unmade <= len(plan.deaths), "a step that was counted and not made is done again"
    assert stats["samples"] == sum(stats["samples_per_worker"]) == counted
    assert sum(stats["staleness"]["histogram"].values()) == counted + unmade
    updates = plan.steps if plan.policy == "hybrid" else n + unmade
    assert server.statistics.version == server.membership.rounds.version == updates
    store: Any = server.store
    assert store.step_counts is None or store.step_counts.total == updates
    if plan.policy != "hogwild":
        (saved,) = torch.load(io.BytesIO(server.optimizers.dump()), weights_only=False)
        assert int(saved.parameters[0]["step"]) == updates


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", POLICIES)
def test_who_dies_at_any_write_loses_nothing_and_counts_nothing_twice(policy: str) -> None:
    judge(alive := tried(Plan(policy)))
    assert alive.n_writes >= (25 if policy == "hogwild" else 80)
    for at in range(alive.n_writes):
        on_failure, stopped = ENDS[at % 4]
        judge(tried(replace(alive.plan, on_failure=on_failure, deaths=(at,), stopped=stopped)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_several_deaths_at_any_writes_lose_nothing_and_count_nothing_twice(
    policy: str, workers: int, seed: int
) -> None:
    rng = random.Random(seed)
    plan = Plan(policy, seed=seed, workers=workers, switches=0.1, late=0.03 * (seed % 3))
    for at in range(tried(plan).n_writes):
        deaths = [at, *(rng.randrange(at, at + 40) for _ in range(workers - 2))]
        on_failure, stopped = ENDS[(at + seed) % 4]
        judge(tried(replace(plan, on_failure=on_failure, deaths=tuple(deaths), stopped=stopped)))
