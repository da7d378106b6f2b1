"""A state in which everybody waits and nobody would be freed is named, not hung in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from hybridtrain import HybridStrategy
from hybridtrain.engine.policies import Grace, Needs
from hybridtrain.engine.protocol.events import Received, Removed, TimerExpired
from hybridtrain.engine.protocol.facts import (
    Apply,
    Drop,
    Fact,
    Order,
    Pushed,
    Release,
    SetTimer,
    TimerFired,
)
from hybridtrain.engine.protocol.messages import Gather, Gathered
from hybridtrain.errors import UserError
from hybridtrain.virtual.service_times import ServiceTimes
from hybridtrain.virtual.virtual_world import VirtualWorld
from tests.lightning.toys import fit
from tests.support.served import Served, gathered, refusals, released


class Never:
    """Holds everybody."""

    def begin(self, n_workers: int) -> Needs:
        return Needs(whole_rounds=False)

    def on(self, fact: Fact) -> Sequence[Order]:
        return ()

    def __repr__(self) -> str:
        return "Never()"


class Some(Never):
    """Lets go on whoever is not worker 1."""

    def on(self, fact: Fact) -> Sequence[Order]:
        match fact:
            case Pushed(0):
                return (Apply((0,)), Release((0,)))
        return ()


class Later(Never):
    """Lets nobody go on before its time has come."""

    def on(self, fact: Fact) -> Sequence[Order]:
        match fact:
            case Pushed(1, at_s):
                return (SetTimer(at_s + 5.0),)
            case TimerFired():
                return (Apply((0, 1)), Release((0, 1)))
        return ()


def test_the_last_worker_to_wait_for_ever_ends_the_wait_of_all_and_names_the_policy() -> None:
    served = Served(2, Never())
    assert served.push(0, 1.0) == []
    reasons = refusals(served.push(1, 1.0))
    assert set(reasons) == {0, 1}
    for reason in reasons.values():
        assert "Never()" in reason
        assert "for ever" in reason
        assert "worker 0, 1 for their release" in reason


def test_a_worker_that_waits_elsewhere_is_named_in_a_wait_for_ever() -> None:
    served = Served(2, Some())
    assert len(served.push(0, 1.0)) == 1
    assert served.push(1, 1.0) == []
    reason = refusals(served.gather(0))[1]
    assert "worker 1 for their release" in reason
    assert "worker 0 for all" in reason


def test_those_who_are_left_when_the_others_are_gone_are_told() -> None:
    served = Served(3, Some())
    assert served.push(1, 1.0) == []
    assert served.server.on(Removed(0)) == []
    assert set(refusals(served.server.on(Removed(2)))) == {1}


def test_who_waits_for_a_time_does_not_wait_for_ever() -> None:
    served = Served(2, Later())
    assert served.push(0, 1.0) == []
    assert served.push(1, 1.0) == []
    assert served.server.wake_at_s == 5.0
    served.now_s = 5.0
    assert [worker for worker, _ in served.server.on(TimerExpired())] == [0, 1]
    assert served.value() == -1.0


def test_a_timer_that_rings_a_little_early_has_rung() -> None:
    served = Served(2, Grace(0.5))
    assert served.push(0, 1.0) == []
    served.now_s = 0.499
    assert served.server.on(TimerExpired()) == released(1, 0)


def test_a_policy_that_waits_for_ever_ends_a_run_in_processes_with_the_reason() -> None:
    with pytest.raises(UserError, match=r"policy Never\(\) would wait for ever"):
        fit(HybridStrategy(policy=Never()), 2, 6)


def test_a_policy_that_waits_for_ever_ends_a_run_in_virtual_time_with_the_reason() -> None:
    with pytest.raises(UserError, match=r"policy Never\(\) would wait for ever"):
        VirtualWorld(Never(), 3, ServiceTimes()).run(updates=1)


@pytest.mark.parametrize("arrives", ["before", "behind"])
def test_who_waits_patiently_is_called_to_a_round_of_all(arrives: str) -> None:
    """Or the round would be one of the others; it comes back to where it has waited."""
    made = Served(3)
    rest = Received(2, Gather("rests", b"", patient=True))
    call = [(2, Gathered((), (), join="round"))]
    came = made.server.on(rest) if arrives == "before" else []
    first = made.push(0, 1.0, invites=True)
    assert (came, first) == ([], call if arrives == "before" else [])
    assert made.push(1, 1.0, invites=True) == []
    if arrives == "behind":
        assert made.server.on(rest) == call
    assert made.push(2, 4.0) == released(1, 0, 1, 2)
    assert made.value() == -2
    assert made.server.on(rest) == []


def test_who_waits_patiently_is_called_to_a_meeting_of_all() -> None:
    made = Served(2)
    states = [Received(worker, Gather("states", b"x", invites=True)) for worker in (0, 1)]
    assert made.server.on(Received(1, Gather("rests", b"", patient=True))) == []
    assert made.server.on(states[0]) == [(1, Gathered((), (), join="meeting"))]
    assert made.server.on(states[1]) == gathered([b"x", b"x"], 0, 1)


class Answers(Never):
    """Answers the first contribution with these."""

    def __init__(self, orders: object) -> None:
        self.orders: Any = orders

    def on(self, fact: Fact) -> Sequence[Order]:
        return self.orders if isinstance(fact, Pushed) else ()


@pytest.mark.parametrize(
    ("orders", "said"),
    [
        ([Apply((9,))], "worker 9 has no contribution, or it was applied"),
        ([Apply((0,)), Apply((0,))], "worker 0 has no contribution, or it was applied"),
        ([Apply((0,)), Drop((0,))], "ordered Drop(workers=(0,)), but worker 0"),
        ([Release((0,))], "worker 0 does not wait, or its contribution was not applied"),
        ([Apply((0,)), Release((0, 1))], "worker 1 does not wait"),
        (
            [Apply(cast(Any, 0))],
            "returned Apply(workers=0); it must return a list of Apply(workers)",
        ),
        (["apply"], "returned 'apply'; it must return a list"),
        (None, "returned None; it must return a list"),
    ],
)
def test_an_impossible_order_is_named_with_its_policy(orders: object, said: str) -> None:
    served = Served(2, Answers(orders))
    reason = refusals(served.push(0, 1.0))[0]
    assert said in reason
    assert "policy" in reason
