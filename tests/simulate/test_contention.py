"""Virtual workers that begin at the same time take longer, by a factor of their number."""

from __future__ import annotations

import pytest

from hybridtrain.engine.policies import make_policy
from hybridtrain.virtual.contention import Contention
from hybridtrain.virtual.network import Conditions
from hybridtrain.virtual.service_times import Measured
from hybridtrain.virtual.virtual_world import VirtualWorld

TIMES = Measured({0: [1.0], 1: [1.5]})


def world(name: str, contention: Contention, epoch: int | None = None) -> VirtualWorld:
    made = VirtualWorld(
        *(make_policy(name), 2, TIMES),
        conditions=Conditions(contention=contention),
        epoch=epoch,
    )
    made.run(mini_batches=100)
    return made


def test_workers_that_are_released_together_may_take_longer() -> None:
    by_number = Contention(lambda together: together)
    in_step, free = world("hybrid", by_number), world("async", by_number)
    assert in_step.now_s == 50 * 2 * 1.5  # two at once, at half the speed
    assert in_step.mean_contention == 2
    assert free.now_s < 100 * 0.7  # one at a time, but for the first mini-batches
    assert free.mean_contention == pytest.approx(1, abs=0.03)


def test_a_worker_on_a_slow_device_waits_no_more_seconds_for_a_core() -> None:
    """It computes 1.5 s, of which a third as much as of the other is the processor's part."""
    contention = Contention(lambda together: together, slower={1: 3.0})
    assert world("hybrid", contention).now_s == pytest.approx(50 * max(1.0 * 2, 1.5 * (1 + 1 / 3)))


def test_workers_that_have_met_begin_together() -> None:
    by_number = Contention(lambda together: together)
    often = world("async", by_number, epoch=4)
    assert often.epochs > 20 and often.mean_contention > 1.3
