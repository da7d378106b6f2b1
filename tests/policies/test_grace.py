"""Whoever comes within the window goes on together; and what comes too late does not count."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import pytest
import torch

from hybridtrain.engine.policies import Grace, Policy, make_policy
from hybridtrain.engine.protocol.facts import (
    Apply,
    Drop,
    Joined,
    Left,
    Order,
    Pushed,
    Release,
    SetTimer,
    TimerFired,
    Waiting,
)
from hybridtrain.engine.updates.named import make_update
from hybridtrain.errors import UserError
from tests.exchanges.test_own_parameters import Two, adam, world


def begun(policy: Policy, workers: int) -> Policy:
    policy.begin(workers)
    for worker in range(workers):
        assert policy.on(Joined(worker)) == ()
    return policy


def closed(*workers: int) -> tuple[Order, ...]:
    return (*(Apply((worker,)) for worker in workers), Release(tuple(sorted(workers))))


def test_the_first_push_opens_a_window_and_its_end_releases_all_that_have_pushed() -> None:
    policy = begun(Grace(0.5), 4)
    assert policy.on(Pushed(2, 10.0)) == (SetTimer(10.5),)
    assert policy.on(Pushed(0, 10.3)) == (SetTimer(10.5),)
    assert policy.on(TimerFired(10.5)) == closed(2, 0)
    assert policy.on(TimerFired(10.6)) == ()  # nobody is there
    assert policy.on(Pushed(1, 11.0)) == (SetTimer(11.5),)
    assert policy.on(Pushed(3, 11.6)) == closed(1, 3)  # later than the timer, which has not rung


def test_a_window_ends_at_once_when_all_workers_have_pushed() -> None:
    policy = begun(Grace(inf), 3)
    assert policy.on(Pushed(1, 1.0)) == policy.on(Pushed(0, 2.0)) == ()
    assert policy.on(Pushed(2, 50.0)) == closed(1, 0, 2)


@pytest.mark.parametrize("fact", [Left(2), Waiting(2)])
def test_a_window_does_not_wait_for_a_worker_that_is_gone(fact: Any) -> None:
    policy = begun(Grace(inf), 3)
    policy.on(Pushed(1, 1.0))
    policy.on(Pushed(0, 2.0))
    assert policy.on(fact) == closed(1, 0)
    assert policy.on(Pushed(0, 3.0)) == ()
    assert policy.on(Left(0)) == ()  # with what it had brought
    assert policy.on(Pushed(1, 4.0)) == closed(1)


def test_contributions_of_a_window_can_make_one_update() -> None:
    policy = begun(Grace(0.5, together=True), 3)
    policy.on(Pushed(2, 10.0))
    policy.on(Pushed(0, 10.3))
    assert policy.on(TimerFired(10.5)) == (Apply((0, 2)), Release((0, 2)))
    assert repr(Grace(0.5)) == "Grace(window_s=0.5)", "as records have it that are older"
    with pytest.raises(UserError, match="together='yes' was given; it must be true or false"):
        make_policy({"name": "grace", "together": "yes"})


def test_a_window_of_0_seconds_is_async() -> None:
    policy = begun(Grace(0), 2)
    assert policy.on(Pushed(1, 3.0)) == closed(1)


@pytest.mark.parametrize("window", [-1, "soon", None, float("nan")])
def test_a_window_that_is_none_is_refused(window: Any) -> None:
    with pytest.raises(UserError, match=r"window_s=.* a number from 0 on, or inf"):
        Grace(window)


def test_an_endless_window_and_delayed_nesterov_are_diloco() -> None:
    """Liu et al. 2024: N movements from one point are one Nesterov step with their mean."""
    task, workers = Two(3), 3
    outer = {"lr": 0.7, "momentum": 0.9}
    grace: Sequence[Any] = (
        {"name": "grace", "window_s": inf},
        {"name": "delayed_nesterov", "buffer": workers, **outer},
    )
    sync: Sequence[Any] = ("hybrid", {"name": "sgd", "nesterov": True, **outer})
    ends = []
    for (policy, update), rounds in ((grace, workers), (sync, 1)):
        exchange = {"name": "movement", "every": 3}
        made = world(task, workers, adam, exchange, policy=policy, update=make_update(update))
        made.run(updates=6 * rounds)
        ends.append(made.parameters())
        assert made.now_s == 18
    for found, wanted in zip(*ends, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


# ---- too late -----------------------------------------------------------------------------------


def test_what_is_too_late_is_dropped() -> None:
    policy = begun(make_policy({"name": "async", "max_staleness": 1}), 3)
    assert policy.on(Pushed(0)) == (Apply((0,)), Release((0,)))
    assert policy.on(Pushed(1)) == (Apply((1,)), Release((1,)))  # one update late
    assert policy.on(Pushed(2)) == (Drop((2,)), Release((2,)))  # two
    assert policy.on(Pushed(2)) == (Apply((2,)), Release((2,)))  # from the newest parameters
    assert policy.on(Pushed(0)) == (Drop((0,)), Release((0,)))
    assert policy.on(Joined(0)) == ()
    policy.on(Pushed(1, last=True))  # nobody would do it again: it counts
    assert policy.on(Pushed(0)) == (Apply((0,)), Release((0,)))


def test_an_empty_push_makes_no_other_push_late() -> None:
    policy = begun(make_policy({"name": "async", "max_staleness": 0}), 2)
    policy.on(Pushed(0, empty=True))
    assert policy.on(Pushed(1)) == (Apply((1,)), Release((1,)))
    assert policy.on(Pushed(0)) == (Drop((0,)), Release((0,)))


def test_with_a_bound_that_nobody_reaches_it_is_async() -> None:
    ends = []
    for policy in ("async", {"name": "async", "max_staleness": 3}):
        made = world(Two(4), 4, adam, "gradient", policy=policy)
        made.run(updates=40)
        ends.append(made.parameters())
        assert max(made.server.statistics.ages) == 3
    assert all(map(torch.equal, *ends))


def test_staleness_stays_within_the_bound() -> None:
    made = world(Two(6), 6, adam, "gradient", policy={"name": "async", "max_staleness": 2})
    made.run(updates=40)
    assert max(made.server.statistics.ages) == 2
    assert sum(made.server.statistics.stats()["dropped"]) > 0


@pytest.mark.parametrize("bound", [-1, 1.5, True, "3"])
def test_a_bound_that_is_none_is_refused(bound: Any) -> None:
    with pytest.raises(UserError, match=r"max_staleness=.* a whole number from 0 on, or null"):
        make_policy({"name": "async", "max_staleness": bound})
