"""Policies by scripts of facts: no processes, no tensors, no clocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridtrain.events import Apply, Fact, Joined, Left, Order, Parked, Pushed, Release
from hybridtrain.policies import All, OnArrival, Policy

BOTH = [All, OnArrival]


def joined(policy: Policy, n_workers: int) -> Policy:
    for worker in range(n_workers):
        assert policy.on(Joined(worker)) == []
    return policy


def round_of(*workers: int) -> list[Order]:
    return [Apply(workers), Release(workers)]


def test_all_waits_for_the_last_and_applies_in_the_order_of_numbers_not_of_arrival() -> None:
    policy = joined(All(), 3)
    assert policy.on(Pushed(2)) == []
    assert policy.on(Pushed(0)) == []
    assert policy.on(Pushed(1)) == round_of(0, 1, 2)


def test_all_begins_every_round_anew() -> None:
    policy = joined(All(), 2)
    for first, second in [(0, 1), (1, 0), (0, 1)]:
        assert policy.on(Pushed(first)) == []
        assert policy.on(Pushed(second)) == round_of(0, 1)


@pytest.mark.parametrize("fact", [Parked(1), Left(1)])
def test_a_worker_that_parks_or_leaves_completes_the_round_of_the_others(fact: Fact) -> None:
    policy = joined(All(), 3)
    policy.on(Pushed(2))
    policy.on(Pushed(0))
    assert policy.on(fact) == round_of(0, 2)


def test_a_parked_worker_is_waited_for_again_once_it_pushes() -> None:
    policy = joined(All(), 2)
    policy.on(Parked(1))
    assert policy.on(Pushed(0)) == round_of(0)
    assert policy.on(Pushed(1)) == []
    assert policy.on(Pushed(0)) == round_of(0, 1)


def test_a_worker_that_leaves_takes_its_unapplied_push_with_it() -> None:
    policy = joined(All(), 3)
    policy.on(Pushed(1))
    assert policy.on(Left(1)) == []
    policy.on(Pushed(0))
    assert policy.on(Pushed(2)) == round_of(0, 2)


def test_a_round_of_nobody_never_ends() -> None:
    policy = joined(All(), 2)
    assert policy.on(Left(0)) == []
    assert policy.on(Left(1)) == []


def test_a_newcomer_is_waited_for() -> None:
    policy = joined(All(), 2)
    policy.on(Pushed(0))
    assert policy.on(Joined(2)) == []
    assert policy.on(Pushed(1)) == []
    assert policy.on(Pushed(2)) == round_of(0, 1, 2)


def test_on_arrival_applies_each_push_at_once_and_alone() -> None:
    policy = joined(OnArrival(), 3)
    for worker in (2, 2, 0, 1):
        assert policy.on(Pushed(worker)) == round_of(worker)
    assert policy.on(Parked(0)) == policy.on(Left(1)) == []


@pytest.mark.parametrize("make", BOTH)
def test_policies_satisfy_their_contract(make: Callable[[], Policy]) -> None:
    assert isinstance(make(), Policy)


# ---- any legal script ---------------------------------------------------------------------------


def play(policy: Policy, n_workers: int, choices: list[tuple[int, int]]) -> None:
    """Drive the policy as workers could, and check every answer.

    A worker computes, waits for its release, is parked, or is gone; ``choices`` pick who acts and
    what it does. At the end everybody who computes pushes: then nobody may still be waiting.
    """
    joined(policy, n_workers)
    state = dict.fromkeys(range(n_workers), "computes")
    unapplied: set[int] = set()

    def tell(fact: Fact) -> None:
        if isinstance(fact, Pushed):
            state[fact.worker] = "waits"
            unapplied.add(fact.worker)
        else:
            state[fact.worker] = "parked" if isinstance(fact, Parked) else "gone"
            unapplied.discard(fact.worker)
        applied: set[int] = set()
        for order in policy.on(fact):
            assert order.workers == tuple(sorted(set(order.workers))), "sorted, nobody twice"
            if isinstance(order, Apply):
                assert set(order.workers) <= unapplied, "only what has been pushed, and once"
                applied |= set(order.workers)
                unapplied.difference_update(order.workers)
            else:
                for worker in order.workers:
                    assert state[worker] == "waits", "nobody is released without a push"
                    assert worker in applied, "first the update, then the release"
                    state[worker] = "computes"
        if policy.lockstep:
            waiting = {w for w, s in state.items() if s == "waits"}
            computing = {w for w, s in state.items() if s == "computes"}
            assert not waiting or computing, "somebody must be able to end the round"

    for index, action in choices:
        worker = index % n_workers
        match state[worker], action:
            case "computes" | "parked", 0 | 1 | 2:
                tell(Pushed(worker))
            case "computes", 3:
                tell(Parked(worker))
            case "computes" | "parked" | "waits", 4:
                tell(Left(worker))
    for worker in [w for w, s in state.items() if s == "computes"]:
        if state[worker] == "computes" and "waits" in state.values():
            tell(Pushed(worker))
    assert "waits" not in state.values(), "when all expected have pushed, all are released"
    assert not unapplied, "every push is applied exactly once, unless its worker left"


CHOICES = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 4)), max_size=40)


@pytest.mark.parametrize("make", BOTH)
@settings(max_examples=150, deadline=None)
@given(n_workers=st.integers(1, 5), choices=CHOICES)
def test_any_script_releases_every_push_once_and_deadlocks_nobody(
    make: Callable[[], Policy], n_workers: int, choices: list[tuple[int, int]]
) -> None:
    play(make(), n_workers, choices)


@settings(max_examples=50, deadline=None)
@given(choices=CHOICES)
def test_a_policy_depends_on_nothing_but_its_facts(choices: list[tuple[int, int]]) -> None:
    facts: list[Fact] = [
        (Pushed, Pushed, Parked, Left, Joined)[kind](worker % 3) for worker, kind in choices
    ]
    first, second = joined(All(), 3), joined(All(), 3)
    assert [first.on(fact) for fact in facts] == [second.on(fact) for fact in facts]
