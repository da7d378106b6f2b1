"""A plan's timing: virtual time, in which workers that are released together take longer."""

from __future__ import annotations

from hybridtrain.exchanges import exchange_of
from hybridtrain.plan.timing import Contention, Contributions, TimingRun
from hybridtrain.policies import make_policy
from hybridtrain.worlds.virtual.network import Conditions
from hybridtrain.worlds.virtual.service_times import Measured


def timed(name: str, times: Contributions, contention: Contention | None = None) -> TimingRun:
    policy = make_policy(name)
    run = TimingRun(policy, exchange_of(policy), 2, times, Conditions(), contention=contention)
    run.run(mini_batches=100)
    return run


def test_workers_that_are_released_together_may_take_longer() -> None:
    def duration(name: str) -> float:
        times = Contributions(Measured({0: [1.0], 1: [1.5]}))
        return timed(name, times, Contention(lambda together: together)).now_s

    assert duration("hybrid") == 50 * 2 * 1.5  # two at once, at half the speed
    assert duration("async") < 100 * 0.7  # one at a time, but for the first mini-batches


def test_contributions_have_so_many_mini_batches_in_turn() -> None:
    times = Contributions(Measured({0: [1.0], 1: [1.0]}), [3, 1], between_s=0.5, step_s=0.25)
    run = timed("hybrid", times)
    assert run.now_s == 25 * (3 * 1.25 + 0.5) + 25 * (1.25 + 0.5)
    assert run.contributions_per_s * run.now_s == 100
