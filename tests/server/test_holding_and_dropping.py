"""What becomes of contributions that are put aside or dropped, at the server."""

from __future__ import annotations

import pytest
import torch

from hybridtrain.engine.policies import BoundedStaleness, FirstK, OnArrival, Policy
from hybridtrain.engine.policies.basic import NotTooLate
from hybridtrain.engine.protocol.events import BrokenOff, Removed
from hybridtrain.engine.protocol.facts import Accumulate, Apply, Drop, Joined, Pushed, Release
from hybridtrain.engine.protocol.messages import Released
from hybridtrain.engine.updates.named import Sum
from hybridtrain.engine.updates.staleness.correction import ByStaleness
from tests.support.served import Served, refusals


def sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def adam(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1.0)


def test_what_is_held_counts_with_the_next_update_weighed_by_samples() -> None:
    served = Served(2, FirstK(3, "use", True))
    assert served.push(0, 1.0, weight=2.0) == [(0, Released(0))]
    assert served.value() == 0.0
    assert served.push(0, 4.0, weight=1.0) == [(0, Released(0))]
    assert served.push(1, 8.0, weight=1.0) == [(1, Released(1))]
    assert served.value() == -(2 * 1.0 + 4.0 + 8.0) / 4
    stats = served.server.statistics.stats()
    assert (stats["updates"], stats["samples"], stats["effective_batch"]) == (1, 4, 4.0)
    assert stats["staleness"]["histogram"] == {0: 3}


@pytest.mark.parametrize("make", [sgd, adam])
def test_a_parameter_that_only_some_of_the_held_have_is_there(make: object) -> None:
    parameters = (torch.zeros(3), torch.zeros(2))
    served = Served(1, FirstK(2, "use", True), parameters, (make,))  # type: ignore[arg-type]
    served.push(0, 2.0, absent=(1,))
    served.push(0, 4.0)
    # The mean of 2 and 4, and of nothing and 4, which is not the same as 4 alone.
    assert served.value(0) == pytest.approx(-3.0 if make is sgd else -1.0, abs=1e-6)
    assert served.value(1) == pytest.approx(-2.0 if make is sgd else -1.0, abs=1e-6)


def test_what_nobody_has_a_gradient_of_is_left_alone() -> None:
    served = Served(1, FirstK(2, "use", True), (torch.zeros(3), torch.ones(2)))
    served.push(0, 2.0, absent=(1,))
    served.push(0, 4.0, absent=(1,))
    assert (served.value(0), served.value(1)) == (-3.0, 1.0)


def test_a_push_without_weight_is_not_put_aside() -> None:
    served = Served(1, FirstK(2, "use", True))
    served.push(0, 99.0, weight=0.0)
    served.push(0, 4.0)
    served.push(0, 99.0, weight=0.0)
    assert served.value() == 0.0
    served.push(0, 6.0)
    assert served.value() == -5.0


@pytest.mark.parametrize(("policy", "twos"), [(OnArrival(), 1), (FirstK(2, "use", True), 2)])
def test_a_sum_counts_what_is_late_less(policy: Policy, twos: int) -> None:
    def summing(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return Sum(parameters, lr=1.0)

    served = Served(2, policy, optimizers=(summing,), correction=ByStaleness())
    for _ in range(2 * twos):  # two updates
        served.push(0, 1.0, weight=3.0)
    served.push(1, 10.0, weight=7.0)
    if twos == 2:
        served.push(0, 1.0)
    assert served.value() == (-7.0 if twos == 1 else -10.0)


def test_two_optimizers_of_the_same_parameters_cannot_both_be_held() -> None:
    served = Served(2, FirstK(3, "use", True), optimizers=(sgd, sgd))
    served.push(0, 1.0, optimizer=0)
    reason = refusals(served.push(1, 1.0, optimizer=1))[1]
    assert "optimizers 0 and 1 step the same parameters" in reason


def test_late_contributions_are_dropped_and_their_workers_read_the_newest_parameters() -> None:
    served = Served(2, FirstK(1))
    served.push(0, 1.0)
    assert served.push(1, 100.0) == [(1, Released(1, counted=False))]
    assert served.value() == -1.0
    assert served.push(1, 10.0) == [(1, Released(2))]
    assert served.value() == -11.0
    stats = served.server.statistics.stats()
    assert stats["dropped"] == [0, 1]
    assert stats["samples"] == 2


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize("policy", [FirstK(1), FirstK(2, several=True), NotTooLate()])
def test_a_later_step_of_a_mini_batch_counts_with_its_first_however_late(
    policy: Policy, follows: bool
) -> None:
    served = Served(2, policy)
    answers = served.push(1, 1.0) + [each for _ in range(4) for each in served.push(0, 1.0)]
    assert 1 in dict(answers), "worker 1 computes while worker 0 makes updates"
    (late,) = served.push(1, 1.0, samples=0.0, follows=follows)
    assert isinstance(late[1], Released) and late[1].counted == follows
    assert served.server.statistics.stats()["dropped"][1] == (not follows)


def test_what_a_dropped_push_tells_of_the_learning_rate_is_heard() -> None:
    served = Served(2, FirstK(1))
    served.push(0, 1.0)
    served.push(1, 100.0, groups=({"lr": 0.5},))
    served.push(1, 10.0)
    assert served.value() == -1.0 - 0.5 * 10.0


def test_what_a_dropped_push_has_written_stays() -> None:
    served = Served(2, FirstK(1))
    served.push(0, 1.0)
    served.push(1, 100.0, writes={0: torch.full((3,), 5.0).numpy().tobytes()})
    assert served.value() == 4.0, "it had read 0, and the other has gone on by -1"


@pytest.mark.parametrize("follows", [True, False])
def test_behind_the_last_update_nothing_counts_but_what_has_been_counted(follows: bool) -> None:
    served = Served(2, OnArrival())
    served.server._rounds.begin(0, last=1)
    assert served.push(0, 1.0) == [(0, Released(1))]
    assert served.push(1, 1.0, follows=follows) == [(1, Released(1, counted=follows))]
    assert served.value() == -1.0


def test_late_contributions_that_are_used_count_one_update_old() -> None:
    served = Served(3, FirstK(2, "use"))
    assert served.push(0, 1.0) == []
    assert len(served.push(1, 3.0)) == 2
    assert served.push(2, 5.0) == []
    assert len(served.push(0, 7.0)) == 2
    assert served.value() == -2.0 - 6.0
    assert served.server.statistics.stats()["staleness"]["histogram"] == {0: 3, 1: 1}


def test_the_late_that_nobody_would_do_again_count_with_the_round_under_way() -> None:
    policy = FirstK(2, several=True)
    policy.begin(2)
    for worker in (0, 1):
        policy.on(Joined(worker))
    assert policy.on(Pushed(0)) == (Accumulate((0,)), Release((0,)))
    assert policy.on(Pushed(0)) == (Apply((0,)), Release((0,)))
    assert policy.on(Pushed(1, last=True)) == (Accumulate((1,)), Release((1,)))
    assert policy.on(Pushed(0)) == (Apply((0,)), Release((0,)))
    assert policy.on(Pushed(1)) == (Drop((1,)), Release((1,)))


def own(parameters: list[torch.nn.Parameter], number: int) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters[number : number + 1], lr=1.0)


def test_two_optimizers_in_one_update_step_each_with_its_own() -> None:
    makes = (lambda p: own(p, 0), lambda p: own(p, 1))
    served = Served(3, FirstK(2, "use"), (torch.zeros(3), torch.zeros(2)), makes)
    assert served.push(0, 2.0, optimizer=0, absent=(1,)) == []
    assert served.push(1, 4.0, optimizer=1, absent=(0,)) == [(0, Released(1)), (1, Released(1))]
    assert (served.value(0), served.value(1)) == (-2.0, -4.0)


@pytest.mark.parametrize("end", ["miss", "break_off"])
def test_who_is_lost_while_it_is_held_back_has_contributed_what_is_in_an_update(end: str) -> None:
    served = Served(3, BoundedStaleness(lead=1))
    for worker in (0, 0, 1):  # worker 0 is too far ahead then, and its second is part of 1's update
        served.push(worker, 1.0)
    assert served.server.membership.rounds.waiting == {0} and served.value() == -2.0
    served.server.on(Removed(0, returns=True) if end == "miss" else BrokenOff())
    stats = served.server.statistics.stats()
    assert (stats["samples"], stats["dropped"]) == (3, [0, 0, 0])
