"""Policies by scripts of facts: no processes, no tensors, no clocks."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridtrain.engine.policies import (
    BoundedStaleness,
    Deadline,
    FirstK,
    NotTooLate,
    OnArrival,
    PipeSGD,
    Policy,
    RoundRobin,
    Softsync,
    Switch,
    WaitForAll,
)
from hybridtrain.engine.policies.switch import Plateau
from hybridtrain.engine.protocol.facts import (
    Accumulate,
    Apply,
    Began,
    Drop,
    Fact,
    Joined,
    Left,
    Order,
    Pushed,
    Release,
    ReleaseThenApply,
    SetTimer,
    TimerFired,
    Waiting,
)

BOTH = [WaitForAll, OnArrival]


def joined(policy: Policy, n_workers: int) -> Policy:
    policy.begin(n_workers)
    for worker in range(n_workers):
        assert not policy.on(Joined(worker))
    return policy


def round_of(*workers: int) -> tuple[Order, ...]:
    return (Apply(workers), Release(workers))


def test_all_waits_for_the_last_and_applies_in_the_order_of_numbers_not_of_arrival() -> None:
    policy = joined(WaitForAll(), 3)
    assert not policy.on(Pushed(2))
    assert not policy.on(Pushed(0))
    assert policy.on(Pushed(1)) == round_of(0, 1, 2)


def test_all_begins_every_round_anew() -> None:
    policy = joined(WaitForAll(), 2)
    for first, second in [(0, 1), (1, 0), (0, 1)]:
        assert not policy.on(Pushed(first))
        assert policy.on(Pushed(second)) == round_of(0, 1)


@pytest.mark.parametrize("fact", [Waiting(1), Left(1)])
def test_a_worker_that_parks_or_leaves_completes_the_round_of_the_others(fact: Fact) -> None:
    policy = joined(WaitForAll(), 3)
    policy.on(Pushed(2))
    policy.on(Pushed(0))
    assert policy.on(fact) == round_of(0, 2)


def test_a_parked_worker_is_waited_for_again_once_it_pushes() -> None:
    policy = joined(WaitForAll(), 2)
    policy.on(Waiting(1))
    assert policy.on(Pushed(0)) == round_of(0)
    assert not policy.on(Pushed(1))
    assert policy.on(Pushed(0)) == round_of(0, 1)


def test_a_worker_that_leaves_takes_its_unapplied_push_with_it() -> None:
    policy = joined(WaitForAll(), 3)
    policy.on(Pushed(1))
    assert not policy.on(Left(1))
    policy.on(Pushed(0))
    assert policy.on(Pushed(2)) == round_of(0, 2)


def test_a_round_of_nobody_never_ends() -> None:
    policy = joined(WaitForAll(), 2)
    assert not policy.on(Left(0))
    assert not policy.on(Left(1))


def test_a_newcomer_is_waited_for() -> None:
    policy = joined(WaitForAll(), 2)
    policy.on(Pushed(0))
    assert not policy.on(Joined(2))
    assert not policy.on(Pushed(1))
    assert policy.on(Pushed(2)) == round_of(0, 1, 2)


def test_on_arrival_applies_each_push_at_once_and_alone() -> None:
    policy = joined(OnArrival(), 3)
    for worker in (2, 2, 0, 1):
        assert policy.on(Pushed(worker)) == round_of(worker)
    assert not policy.on(Waiting(0))
    assert not policy.on(Left(1))


@pytest.mark.parametrize("make", BOTH)
def test_policies_satisfy_their_contract(make: Callable[[], Policy]) -> None:
    assert isinstance(make(), Policy)


# ---- any legal script ---------------------------------------------------------------------------


class Script:
    """Drives a policy as workers could, and checks every answer.

    A worker computes, waits for its release, is parked, or is gone.
    """

    def __init__(self, policy: Policy, n_workers: int) -> None:
        self.policy = policy
        self.requirements = policy.begin(n_workers)
        for worker in range(n_workers):
            assert not policy.on(Joined(worker))
        self.state = dict.fromkeys(range(n_workers), "computes")
        self.unapplied: set[int] = set()
        self.held = 0
        self.now_s = 0.0
        self.wake_at_s: float | None = None
        self.orders: list[Order] = []

    def tell(self, fact: Fact) -> None:
        match fact:
            case Pushed(worker):
                self.state[worker] = "waits"
                self.unapplied.add(worker)
            case Waiting(worker) | Left(worker):
                self.state[worker] = "parked" if isinstance(fact, Waiting) else "gone"
                self.unapplied.discard(worker)
        for order in self.policy.on(fact):
            self.orders.append(order)
            self.obey(order)
        waiting = "waits" in self.state.values()
        free = "computes" in self.state.values() or self.wake_at_s is not None
        assert not waiting or free, "somebody must be able to free those who wait"

    def obey(self, order: Order) -> None:
        if isinstance(order, SetTimer):
            assert order.at_s > self.now_s
            self.wake_at_s = order.at_s
            return
        assert order.workers == tuple(sorted(set(order.workers))), "sorted, nobody twice"
        if isinstance(order, ReleaseThenApply):
            self.unapplied.difference_update(order.workers)  # the update is made behind it
        if isinstance(order, Release | ReleaseThenApply):
            for worker in order.workers:
                assert self.state[worker] == "waits", "nobody is released without a push"
                assert worker not in self.unapplied, "first it counts, or does not, then it goes on"
                self.state[worker] = "computes"
            return
        assert set(order.workers) <= self.unapplied, "only what has been pushed, and once"
        assert not isinstance(order, Accumulate) or self.requirements.holds
        self.held = 0 if isinstance(order, Apply) else self.held + isinstance(order, Accumulate)
        self.unapplied.difference_update(order.workers)

    def wake(self) -> None:
        if self.wake_at_s is not None:
            self.now_s, self.wake_at_s = self.wake_at_s, None
            self.tell(TimerFired(self.now_s))

    def act(self, worker: int, action: int) -> None:
        self.now_s += 1.0
        if self.wake_at_s is not None and self.wake_at_s <= self.now_s:
            self.wake()
        match self.state[worker], action:
            case "computes" | "parked", 0 | 1 | 2:
                self.tell(Pushed(worker, self.now_s, empty=action == 2))
            case "computes", 3:
                self.tell(Waiting(worker))
            case "computes" | "parked" | "waits", 4:
                self.tell(Left(worker))

    def end(self) -> None:
        """Whoever computes comes to the end of its data, until nobody does."""
        while computing := [w for w, s in self.state.items() if s == "computes"]:
            self.tell(Waiting(computing[0]))
            self.wake()
        assert "waits" not in self.state.values(), "nobody is left waiting at the end"
        assert not self.unapplied, "every push has counted or been dropped, unless its worker left"
        assert self.held == 0, "nothing is put aside for good"


def play(policy: Policy, n_workers: int, choices: list[tuple[int, int]]) -> list[Order]:
    script = Script(policy, n_workers)
    for index, action in choices:
        script.act(index % n_workers, action)
    script.end()
    return script.orders


CHOICES = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 4)), max_size=40)
MANY: dict[str, Callable[[int], Policy]] = {
    "hybrid": lambda n: WaitForAll(),
    "async": lambda n: OnArrival(),
    "pipe_sgd": lambda n: PipeSGD(warm_up=2),
    "backup": lambda n: FirstK(),
    "backup of two": lambda n: FirstK(min(2, n)),
    "backup in time": lambda n: Deadline(),
    "backup in time, strict": lambda n: Deadline(c=0.0, at_least=1),
    "k_async": lambda n: FirstK(late="use"),
    "k_batch_sync": lambda n: FirstK(3, several=True),
    "k_batch_async": lambda n: FirstK(3, late="use", several=True),
    "softsync": lambda n: Softsync(1),
    "ssp 0": lambda n: BoundedStaleness(0),
    "ssp 1": lambda n: BoundedStaleness(1),
    "ssp 3": lambda n: BoundedStaleness(3),
    "ssp": lambda n: BoundedStaleness(None),
    "hybrid, then async": lambda n: Switch(WaitForAll(), OnArrival(), at_update=2),
    "async, then hybrid": lambda n: Switch(OnArrival(), WaitForAll(), at_update=3),
    "backup, then ssp": lambda n: Switch(FirstK(), BoundedStaleness(1), at_update=2),
    "k_batch_async, then k_async": lambda n: Switch(
        FirstK(3, "use", True), FirstK(1, "use"), at_update=1
    ),
}


@pytest.mark.few(6)
@pytest.mark.parametrize("name", MANY)
@settings(max_examples=100, deadline=None)
@given(n_workers=st.integers(1, 5), choices=CHOICES)
def test_any_script_lets_every_push_count_once_and_deadlocks_nobody(
    name: str, n_workers: int, choices: list[tuple[int, int]]
) -> None:
    play(MANY[name](n_workers), n_workers, choices)


@pytest.mark.parametrize("name", MANY)
@settings(max_examples=20, deadline=None)
@given(choices=CHOICES)
def test_a_policy_depends_on_nothing_but_its_facts(
    name: str, choices: list[tuple[int, int]]
) -> None:
    policy = MANY[name](3)
    assert play(policy, 3, choices) == play(policy, 3, choices), "begin() forgets everything"


# ---- the dial: policies that are the same at their limits ----------------------------------------

SAME: dict[str, tuple[Callable[[int], Policy], Callable[[int], Policy]]] = {
    "backup k=n is hybrid": (lambda n: FirstK(n), lambda n: WaitForAll()),
    "k_async k=n is hybrid": (lambda n: FirstK(n, "use"), lambda n: WaitForAll()),
    "ssp 0 is hybrid": (lambda n: BoundedStaleness(0), lambda n: WaitForAll()),
    "pipe_sgd delay=0 is hybrid": (lambda n: PipeSGD(delay=0), lambda n: WaitForAll()),
    "ssp without a bound is async": (lambda n: BoundedStaleness(None), lambda n: OnArrival()),
    "k_async k=1 is async": (lambda n: FirstK(1, "use"), lambda n: OnArrival()),
    "k_batch_async k=1 is async": (lambda n: FirstK(1, "use", True), lambda n: OnArrival()),
    "softsync n=W is async": (lambda n: Softsync(n), lambda n: OnArrival()),
    "switch between equals changes nothing": (
        lambda n: Switch(WaitForAll(), BoundedStaleness(0), at_update=1),
        lambda n: WaitForAll(),
    ),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", SAME)
@settings(max_examples=100, deadline=None)
@given(n_workers=st.integers(1, 5), choices=CHOICES)
def test_a_policy_at_the_limit_of_its_options_is_another_policy(
    name: str, n_workers: int, choices: list[tuple[int, int]]
) -> None:
    one, other = (make(n_workers) for make in SAME[name])
    assert play(one, n_workers, choices) == play(other, n_workers, choices)


@pytest.mark.parametrize(
    ("losses", "reached"),
    [
        ((4.0, 2.0, 1.0, 1.0, 0.5, 0.5), ""),  # each mean of two is better
        ((4.0, 2.0, 3.0, 3.0), "   !"),  # the second is not
        ((4.0, 2.0, 2.9, 2.9), ""),  # by 0.1, which is enough
        ((4.0, 2.0, 2.96, 2.96), "   !"),  # by 0.04, which is not
        ((4.0, 2.0, 2.0, 2.0, 2.9, 2.9), "     !"),  # better than the first, not than the best
    ],
)
def test_a_plateau_is_a_mean_no_better_than_the_best(
    losses: tuple[float, ...], reached: str
) -> None:
    plateau = Plateau(patience=2, min_delta=0.05)
    told = "".join("!" if plateau.reached(loss) else " " for loss in losses)
    assert told.rstrip() == reached


def test_a_switch_whose_losses_nobody_tells_stays_where_it_is() -> None:
    policy = Switch(WaitForAll(), OnArrival(), patience=1)
    policy.begin(1)
    policy.on(Joined(0))
    for _ in range(9):
        assert policy.on(Pushed(0)) == [*round_of(0)]
    assert policy._now is policy.first


@pytest.mark.parametrize("first", [OnArrival(), FirstK(1, "use")])
@pytest.mark.parametrize(("when", "full"), [("at_update", 2), ("patience", 4)])
def test_what_moves_nothing_brings_a_switch_no_nearer(first: Policy, when: str, full: int) -> None:
    """Neither as an update, nor as a loss: the second mean of two losses is no better."""
    policy = Switch(first, WaitForAll(), **{when: 2})
    policy.begin(2)
    policy.on(Joined(0))
    policy.on(Joined(1))
    for _ in range(full):
        assert policy._now is policy.first
        for empty in (True, True, True, True, False):
            policy.on(Pushed(0, loss=1.0, empty=empty))
    assert policy._now is policy.then


def test_an_update_of_what_was_put_aside_counts_for_a_switch() -> None:
    """As on the server: at the end of an epoch nobody brings anything to it."""
    policy = joined(Switch(FirstK(2, "use", several=True), OnArrival(), at_update=2), 3)
    for worker in range(3):  # the third is put aside
        policy.on(Pushed(worker))
    for worker in range(3):
        assert policy._now is policy.first
        policy.on(Waiting(worker))
    assert policy._now is policy.then


def test_what_was_put_aside_counts_for_one_update() -> None:
    policy = joined(Switch(FirstK(2, "use", several=True), OnArrival(), at_update=2), 2)
    for worker in (0, 1):
        policy.on(Pushed(worker))
    for worker in (0, 1):  # an update of nothing
        policy.on(Pushed(worker, empty=True))
    assert policy._now is policy.first


def test_a_run_that_begins_at_the_switch_is_behind_it() -> None:
    policy = joined(Switch(OnArrival(), WaitForAll(), at_update=2), 2)
    policy.on(Began(2))
    assert not policy.on(Pushed(0)), "it waits for the other"


@pytest.mark.parametrize("late", [FirstK(1), Deadline(), NotTooLate()])
def test_a_worker_that_joins_with_older_parameters_is_late(late: Policy) -> None:
    policy = joined(late, 2)
    policy.on(Joined(1, behind=1))
    assert policy.on(Pushed(1)) == (Drop((1,)), Release((1,)))


# ---- backup workers with a deadline -------------------------------------------------------------


def in_time(n_workers: int) -> Policy:
    """All have pushed at second 1, and nobody knows yet how long a mini-batch takes."""
    policy = joined(Deadline(at_least=1), n_workers)
    for worker in range(n_workers - 1):
        assert not policy.on(Pushed(worker, 1.0))
    assert policy.on(Pushed(n_workers - 1, 1.0)) == round_of(*range(n_workers))
    return policy


def test_whoever_is_as_fast_as_the_others_is_in_time() -> None:
    policy = in_time(3)
    for worker in (0, 1):
        assert policy.on(Pushed(worker, 2.0)) == (SetTimer(pytest.approx(2.1)),)
    assert policy.on(Pushed(2, 2.05)) == round_of(0, 1, 2)


def test_a_pause_is_no_part_of_a_mini_batch() -> None:
    policy = in_time(2)
    for worker in (0, 1):
        policy.on(Waiting(worker))
    for worker in (0, 1):
        policy.on(Joined(worker))
    assert not policy.on(Pushed(0, 51.0)), "nobody knows when it began"
    assert policy.on(Pushed(1, 51.0)) == round_of(0, 1)
    assert policy.on(Pushed(0, 52.0)) == (SetTimer(pytest.approx(52.1)),)


@pytest.mark.parametrize("late", ["use", "drop"])
@pytest.mark.parametrize("several", [False, True])
def test_an_empty_push_is_none_of_the_first_k(late: Any, several: bool) -> None:
    policy = joined(FirstK(2, late, several), 3)
    for _ in range(2):
        for worker in (0, 1, 0):
            assert policy.on(Pushed(worker, empty=True)) == round_of(worker)
        aside = (Accumulate((2,)), Release((2,))) if several else ()
        assert policy.on(Pushed(2)) == aside, "it is not late: there was no update"
        goes_on = Accumulate((0,)) if several else Apply((0,))
        assert policy.on(Pushed(0, empty=True)) == (goes_on, Release((0,)))
        assert policy.on(Pushed(1)) == round_of(*((1,) if several else (1, 2)))
        for worker in (0, 2):
            policy.on(Joined(worker))  # it has read the newest


# ---- what policies say of themselves ------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "gathers"),
    [
        (BoundedStaleness(0), 4),
        (BoundedStaleness(1), 1),
        (Deadline(), 3),  # one is late, as a rule
        (Deadline(at_least=4), 4),
        (Switch(WaitForAll(), OnArrival(), at_update=5), 4),  # later one
        (Switch(WaitForAll(), OnArrival(), patience=5), 1),  # from when on is not known
    ],
)
def test_a_policy_tells_how_many_contributions_make_an_update(policy: Policy, gathers: int) -> None:
    assert policy.begin(4).gathers == gathers


def test_while_one_part_of_a_switch_drops_nothing_no_gradient_is_too_late() -> None:
    assert Switch(OnArrival(), NotTooLate(2), at_update=5).begin(4).max_staleness == inf
    assert Switch(NotTooLate(1), NotTooLate(2), at_update=5).begin(4).max_staleness == 2


@pytest.mark.parametrize(
    "policy",
    [
        WaitForAll(),
        FirstK(3),
        FirstK(3, "use"),
        BoundedStaleness(0),
        Switch(WaitForAll(), BoundedStaleness(0), at_update=5),
    ],
)
def test_lock_step_is_known_as_such(policy: Policy) -> None:
    assert policy.begin(3).whole_rounds


@pytest.mark.parametrize(
    "policy",
    [
        OnArrival(),
        FirstK(2),
        FirstK(3, several=True),
        BoundedStaleness(1),
        RoundRobin(),
        Deadline(),
        Softsync(1),
    ],
)
def test_policies_that_let_workers_be_ahead_have_no_whole_rounds(policy: Policy) -> None:
    assert not policy.begin(3).whole_rounds
