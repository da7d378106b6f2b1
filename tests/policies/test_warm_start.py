"""One worker begins alone, and the others where it has come to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridtrain.engine.policies import make_policy
from hybridtrain.engine.protocol.facts import (
    Apply,
    Began,
    Fact,
    Joined,
    Left,
    Order,
    Pushed,
    Ready,
    Release,
    Waiting,
)
from hybridtrain.errors import UserError
from tests.exchanges.test_own_parameters import Two, momentum, world


def begun(updates: int = 2, workers: int = 3) -> Any:
    policy = make_policy({"name": "async", "warm_start": updates})
    assert policy.begin(workers).asks
    for worker in range(workers):
        policy.on(Joined(worker))
    return policy


def told(policy: Any, *facts: Fact) -> list[Order]:
    return [order for fact in facts for order in policy.on(fact)]


def test_other_workers_begin_after_the_given_number_of_updates_of_the_first() -> None:
    policy = begun(2)
    assert told(policy, Ready(2), Ready(0), Ready(1)) == [Release((0,))]
    assert told(policy, Pushed(0)) == [Apply((0,)), Release((0,))]
    assert told(policy, Pushed(0)) == [Apply((0,)), Release((0,)), Release((1,)), Release((2,))]
    assert told(policy, Pushed(1), Ready(2)) == [Apply((1,)), Release((1,)), Release((2,))]


@pytest.mark.parametrize("fact", [Waiting(0), Left(0)])
def test_other_workers_begin_where_the_first_waits_for_them_or_is_lost(fact: Fact) -> None:
    policy = begun(5)
    told(policy, Ready(0), Ready(1), Pushed(0))
    assert told(policy, fact) == [Release((1,))]
    assert told(policy, Ready(2)) == [Release((2,))]


def test_a_push_that_only_fetches_is_no_update_of_a_warm_start() -> None:
    policy = begun(1)
    told(policy, Ready(0), Ready(1))
    assert told(policy, Pushed(0, empty=True)) == [Apply((0,)), Release((0,))]
    assert told(policy, Pushed(0))[-1] == Release((1,))


def test_meetings_before_training_end_nothing() -> None:
    policy = begun(5)
    assert told(policy, Waiting(1), Waiting(0), Joined(0), Joined(1), Ready(1)) == []
    assert told(policy, Ready(0)) == [Release((0,))]


def test_a_worker_lost_while_it_waits_for_the_warm_start_is_not_released() -> None:
    policy = begun(1)
    assert told(policy, Ready(0), Ready(1), Ready(2), Left(1)) == [Release((0,))]
    assert told(policy, Pushed(0))[2:] == [Release((2,))]


def test_a_run_that_is_resumed_behind_its_warm_start_has_none() -> None:
    policy = begun(4)
    assert told(policy, Began(4), Ready(1)) == [Release((1,))]


def test_updates_of_a_warm_start_make_no_other_worker_late() -> None:
    policy = make_policy({"name": "async", "warm_start": 2, "max_staleness": 0})
    policy.begin(2)
    told(policy, Joined(0), Joined(1), Ready(0), Ready(1), Pushed(0), Pushed(0))
    assert told(policy, Pushed(1)) == [Apply((1,)), Release((1,))]


@pytest.mark.parametrize("given", [0, -1, 2.0, True, "all"])
def test_bad_values_are_said(given: Any) -> None:
    with pytest.raises(UserError, match=r"warm_start=.* whole number from 1 on.*or null"):
        make_policy({"name": "async", "warm_start": given})


@pytest.mark.parametrize("exchange", ["accumulated", "gradient"])
def test_in_virtual_time_the_others_begin_with_what_the_first_has_made(exchange: str) -> None:
    """Worker 0 takes four seconds; then three updates a second, begun at one point."""
    task, policy = Two(3), {"name": "async", "warm_start": 4}
    made = world(task, 3, momentum, exchange, policy=policy)
    made.run(updates=4 + 3)
    assert made.now_s == 5
    assert made.server.statistics.stats()["samples_per_worker"] == [5, 1, 1]
    masters = [torch.nn.Parameter(p) for p in task.parameters()]
    optimizer = momentum(masters)
    for step in range(5):
        read = [master.detach().clone() for master in masters]
        for worker in range(3 if step == 4 else 1):
            for master, gradient in zip(masters, task.gradient(worker, read), strict=True):
                master.grad = gradient
            optimizer.step()
    for found, wanted in zip(made.parameters(), masters, strict=True):
        torch.testing.assert_close(found, wanted.detach(), rtol=0, atol=1e-12)


def test_a_warm_start_is_refused_as_a_part_of_a_switch() -> None:
    late = {"name": "async", "warm_start": 3}
    with pytest.raises(UserError, match=r"switch: then=WarmStart\(.* cannot be a part"):
        make_policy({"name": "switch", "then": late, "at_update": 5}).begin(2)
