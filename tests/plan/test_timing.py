"""A strategy's timing from its policy alone is that of virtual time, to rounding."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from hybridtrain.engine.exchanges import exchange_of
from hybridtrain.engine.policies import POLICIES, make_policy
from hybridtrain.virtual.network import Conditions, Network
from hybridtrain.virtual.plan.timing import Contention, TimingRun
from hybridtrain.virtual.service_times import ServiceTimes
from hybridtrain.virtual.virtual_world import VirtualWorld

N, MINI_BATCHES, EPOCH = 4, 200, 40
SPECS: list[Any] = [
    *sorted(POLICIES.keys() - {"hogwild", "sandblaster", "switch"}),
    {"name": "backup", "k": "auto"},
    {"name": "softsync", "n": 2},
    {"name": "async", "max_staleness": 3},
    {"name": "async", "warm_start": 5},
    {"name": "grace", "window_s": 0.1, "together": True},
    {"name": "switch", "first": "hybrid", "then": "async", "at_update": 20},
]
NETWORKS = (
    Network(),
    Network(0.01, 4e6, 8e6, 400_000),  # a link for each worker, and the server's
    Network(0.01, 4e6, 4e6, 400_000, hosts=2),
)
TIMES = ServiceTimes("lognormal", 0.3, 0.3, {1: 3.0})


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_policy_alone_takes_as_long_as_with_its_server_in_virtual_time(spec: Any) -> None:
    for network, epoch, update_s in product(NETWORKS, (None, EPOCH), (0.0, 0.02)):
        under = Conditions(network=network, update_s=update_s)
        world = VirtualWorld(make_policy(spec), N, TIMES, conditions=under, epoch=epoch)
        world.run(mini_batches=MINI_BATCHES)
        policy = make_policy(spec)
        draws = [TIMES.stream(worker, 0) for worker in range(N)]
        run = TimingRun(policy, exchange_of(policy), draws, network, update_s, epoch)
        run.run(MINI_BATCHES)
        statistics, stats = world.server.statistics, world.server.statistics.stats()
        waiting = sum(stats["waiting_share"]) / N
        expected = (world.now_s, stats["updates"], stats["samples"], sum(stats["dropped"]), waiting)
        found = (run.now_s, run.version, run.counted[1], run.dropped, run.waiting_share)
        assert found == pytest.approx(expected, rel=1e-9), (network, epoch, update_s)
        assert run.staleness == pytest.approx(statistics.mean_age())
        assert run.network_s == pytest.approx(world.network_s)
        assert run.links.server_s == pytest.approx(world.links.server_s)


def test_workers_that_are_released_together_may_take_longer() -> None:
    def duration(name: str) -> float:
        draws = [lambda: 1.0, lambda: 1.5]
        policy = make_policy(name)
        run = TimingRun(
            *(policy, exchange_of(policy), draws, Network()),
            contention=Contention(lambda together: together),
        )
        run.run(100)
        return run.now_s

    assert duration("hybrid") == 50 * 2 * 1.5  # two at once, at half the speed
    assert duration("async") < 100 * 0.7  # one at a time, but for the first mini-batches
