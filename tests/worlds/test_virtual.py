"""Virtual time: the same server, and figures that theory knows exactly.

H_n is the n-th harmonic number, P the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from hybridtrain.engine.policies import OnArrival, Policy, WaitForAll
from hybridtrain.errors import UserError
from hybridtrain.virtual.network import Conditions
from hybridtrain.virtual.script import Dies, Joins, Script
from hybridtrain.virtual.service_times import SHAPES, ServiceTimes
from hybridtrain.virtual.virtual_world import VirtualWorld
from tests.picking import by_default

EXPONENTIAL = ServiceTimes("exponential")
CONSTANT = ServiceTimes("constant")


def harmonic(n: int) -> float:
    return sum(1 / i for i in range(1, n + 1))


def timed(policy: Policy, workers: int, updates: int, times: ServiceTimes = EXPONENTIAL) -> Any:
    world = VirtualWorld(policy, workers, times, batch_size=4)
    world.run(updates=updates)
    return world


# ---- time only ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("workers", by_default([2, 8, 32], 8))
def test_waiting_for_all_takes_as_long_as_the_slowest(workers: int) -> None:
    """Dutta et al. 2018: E[T] = H_P for exponential service times of mean 1."""
    world = timed(WaitForAll(), workers, 4000)
    assert world.now_s / 4000 == pytest.approx(harmonic(workers), rel=0.03)
    stats = world.server.statistics.stats()
    assert stats["samples"] == 4000 * workers * 4
    assert stats["staleness"]["max"] == 0
    waiting = sum(stats["waiting_share"]) / workers
    assert waiting == pytest.approx(1 - 1 / harmonic(workers), abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("workers", by_default([2, 8, 32], 8))
def test_never_waiting_is_as_fast_as_all_together_and_p_minus_1_updates_stale(
    workers: int,
) -> None:
    """Memoryless workers: P(staleness = k) = (1/P)(1 - 1/P)^k, mean P - 1, variance P(P - 1)."""
    world = timed(OnArrival(), workers, 40_000)
    statistics = world.server.statistics
    assert 40_000 / world.now_s == pytest.approx(workers, rel=0.03)
    assert statistics.mean_age() == pytest.approx(workers - 1, rel=0.03)
    total = sum(statistics.ages.values())
    variance = (
        sum(n * (age - statistics.mean_age()) ** 2 for age, n in statistics.ages.items()) / total
    )
    assert variance == pytest.approx(workers * (workers - 1), rel=0.1)
    assert statistics.ages[0] / total == pytest.approx(1 / workers, rel=0.1)
    assert max(statistics.stats()["waiting_share"]) == 0.0


def test_equal_workers_take_turns_and_are_exactly_p_minus_1_updates_stale() -> None:
    world = timed(OnArrival(), 5, 1000, CONSTANT)
    assert world.server.statistics.ages == {0: 1, 1: 1, 2: 1, 3: 1, 4: 996}


def test_a_straggler_holds_up_those_who_wait_and_nobody_else() -> None:
    slow = ServiceTimes("constant", slower={1: 3.0})
    assert timed(WaitForAll(), 4, 300, slow).now_s == pytest.approx(900.0)
    free = timed(OnArrival(), 4, 1000, slow)
    assert 1000 / free.now_s == pytest.approx(3 + 1 / 3, rel=0.01)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", SHAPES)
def test_the_same_seed_gives_the_same_run_and_another_seed_another(kind: str) -> None:
    def run(seed: int) -> tuple[float, dict[int, int]]:
        world = VirtualWorld(OnArrival(), 7, ServiceTimes(kind), seed=seed)
        world.run(updates=500)
        return world.now_s, dict(world.server.statistics.ages)

    assert run(1) == run(1)
    assert (run(1) == run(2)) == (kind == "constant")


@pytest.mark.parametrize("kind", SHAPES)
def test_service_times_have_the_mean_that_was_asked_for(kind: str) -> None:
    draw = ServiceTimes(kind, mean_s=2.0, slower={3: 1.5}).stream(3, seed=0)
    values = [draw() for _ in range(60_000)]
    assert sum(values) / len(values) == pytest.approx(3.0, rel=0.03)
    assert min(values) > 0


def test_a_run_goes_on_where_it_stopped() -> None:
    whole, parts = timed(OnArrival(), 3, 90), timed(OnArrival(), 3, 40)
    parts.run(until_s=parts.now_s + 5)
    parts.run(updates=90)
    assert (parts.now_s, parts.events) == (whole.now_s, whole.events)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"kind": "normal"}, "compute='normal' was given; known are constant"),
        ({"mean_s": -1.0}, "compute.mean_s=-1.0 was given; it must be a number above 0"),
        ({"mean_s": math.inf}, "must be a number above 0"),
        ({"slower": {2: 0.0}}, r"slower\.2=0.0"),
        ({"kind": "pareto", "shape": 1.0}, "there is no mean"),
        ({"kind": "lognormal", "shape": -1.0}, "must not be negative"),
        ({"kind": "shifted_exponential", "shape": 1.5}, "0 to 1"),
    ],
)
def test_impossible_service_times_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        ServiceTimes(**arguments)


@pytest.mark.parametrize(
    ("script", "missing"),
    [(Script((Dies(0.5, 3),)), 80), (Script((Joins(1000.0, 3),)), 0)],
    ids=["dies", "not there"],
)
def test_from_the_next_epoch_on_the_others_have_the_share_of_a_worker_that_is_not_there(
    script: Script, missing: int
) -> None:
    world = VirtualWorld(
        WaitForAll(), 4, CONSTANT, 8, epoch=320, conditions=Conditions(script=script)
    )
    world.run(epochs=4)
    assert world.server.statistics.samples == 4 * 320 - missing, "of the epoch in which it dies"


# ---- real gradients -----------------------------------------------------------------------------


class Quadratic:
    """f(w) = h w² / 2 for a vector of independent copies."""

    def __init__(self, h: float = 1.0, start: float = 1.0, copies: int = 1) -> None:
        self.h, self.start, self.copies = h, start, copies
        self.applied = torch.zeros(copies, dtype=torch.float64)

    def parameters(self) -> list[torch.Tensor]:
        return [torch.full((self.copies,), self.start, dtype=torch.float64)]

    def gradient(self, worker: int, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        gradient = self.h * values[0]
        self.applied += gradient
        return [gradient]


def sgd(lr: float, **rest: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, **rest)


def trained(policy: Policy, workers: int, updates: int, task: Quadratic, lr: float) -> VirtualWorld:
    world = VirtualWorld(policy, workers, CONSTANT, task=task, optimizer=sgd(lr))
    world.run(updates=updates)
    return world


def value(world: VirtualWorld) -> float:
    return float(world.parameters()[0][0])


def test_two_overlapping_mini_batches_add_both_changes_as_in_the_documentation() -> None:
    """W + ΔW(W) + ΔW(W): the second increment was evaluated at the same W as the first."""
    eta, h = 0.1, 0.7
    world = trained(OnArrival(), 2, 2, Quadratic(h), eta)
    assert value(world) == pytest.approx(1 - 2 * eta * h, rel=1e-15)
    alone = trained(OnArrival(), 1, 2, Quadratic(h), eta)
    assert value(alone) == pytest.approx((1 - eta * h) ** 2, rel=1e-15)
    both = trained(WaitForAll(), 2, 1, Quadratic(h), eta)
    assert value(both) == pytest.approx(1 - eta * h, rel=1e-15), "their mean, once"


@pytest.mark.parametrize("policy", [WaitForAll, OnArrival])
def test_updates_are_conserved_under_plain_sgd(policy: Callable[[], Policy]) -> None:
    """What the parameters have moved is the learning rate times what was applied."""
    task, workers = Quadratic(), 4
    world = VirtualWorld(policy(), workers, EXPONENTIAL, task=task, optimizer=sgd(0.01))
    world.run(updates=200)
    if policy is WaitForAll:
        task.applied /= workers  # whole rounds only, and of each the mean
    assert 1.0 - value(world) == pytest.approx(0.01 * float(task.applied[0]), rel=1e-9)


def test_a_task_without_an_optimizer_lets_only_time_pass() -> None:
    world = VirtualWorld(WaitForAll(), 2, CONSTANT, task=Quadratic())
    world.run(updates=3)
    assert (world.parameters(), world.now_s) == ([], 3.0)
