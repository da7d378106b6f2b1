"""What is to be simulated, and the figures that come of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hybridtrain.errors import UserError
from hybridtrain.policies import make_policy
from hybridtrain.worlds.conditions import Conditions
from hybridtrain.worlds.service import ServiceTimes, Times
from hybridtrain.worlds.task import MakeOptimizer, Task
from hybridtrain.worlds.virtual import VirtualWorld

Train = Callable[[], tuple[Task, MakeOptimizer]]  # a fresh task, and its optimizer


@dataclass(frozen=True)
class Way:
    """A strategy as the user wrote it, and the policy's name and options that this means."""

    label: str
    given: Any


HYBRID, ASYNC = Way("hybrid", "hybrid"), Way("async", "async")


@dataclass(frozen=True)
class Plan:
    """What is to be simulated: every strategy with every number of workers.

    Each ends after ``mini_batches`` of all workers together, or ``seconds`` of virtual time, what
    comes first. ``train``: with real gradients.
    """

    strategies: tuple[Way, ...] = (HYBRID, ASYNC)
    workers: tuple[int, ...] = (8,)
    times: Times = field(default_factory=ServiceTimes)
    slower: Mapping[int, float] = field(default_factory=dict)  # as it is in ``times``
    conditions: Conditions = field(default_factory=Conditions)
    batch_size: int = 32
    mini_batches: float = 20_000
    seconds: float = math.inf
    seed: int = 0
    train: Train | None = None


@dataclass(frozen=True)
class Row:
    """What one strategy did with one number of workers. Seconds are virtual, but for the last.

    Shares of time are means over the workers: computing, waiting for a release, and under way on
    the network; they add up to 1 as far as a worker was there. ``staleness``: age in updates ->
    contributions.
    """

    strategy: str
    workers: int
    seconds: float
    updates: int
    samples: int
    updates_per_s: float
    samples_per_s: float
    efficiency: float  # of the sum of the workers' own speeds
    waiting_share: float
    network_share: float
    dropped: int  # contributions that did not count
    interrupted: int  # mini-batches begun anew
    staleness_mean: float
    staleness_median: int
    staleness_p99: int
    staleness_max: int
    staleness: dict[int, int]
    loss: list[tuple[float, float]]  # (virtual time, mean of the losses around it)
    events_per_s: float  # of this process's time on its core


def simulate(plan: Plan, way: Way, workers: int) -> Row:
    """One run in virtual time, of at least ``plan.mini_batches`` mini-batches.

    Raises:
        UserError: if the policy makes no sense for so many workers, or the plan names a worker
            that is not there.
    """
    for worker in plan.slower:
        if worker >= workers:
            raise UserError(
                f"slower.{worker} was given, but {workers} workers have the numbers 0 to "
                f"{workers - 1}"
            )
    world = _world(plan, way, workers)
    began = time.process_time()
    world.run(until_s=plan.seconds, mini_batches=plan.mini_batches)
    return _row(plan, way, world, time.process_time() - began)


def _world(plan: Plan, way: Way, workers: int) -> VirtualWorld:
    make = partial(
        VirtualWorld, make_policy(way.given), workers, plan.times, plan.batch_size, plan.seed
    )
    if plan.train is None:
        return make(conditions=plan.conditions)
    task, optimizer = plan.train()
    return make(task=task, optimizer=optimizer, conditions=plan.conditions)


def _row(plan: Plan, way: Way, world: VirtualWorld, took_s: float) -> Row:
    ledger, stats = world.server.ledger, world.server.ledger.stats()
    workers = ledger.n_workers
    ideal = sum(1 / plan.times.expected_s(worker) for worker in range(workers))
    seconds = world.now_s or math.inf
    per_s = stats["samples"] / seconds
    return Row(
        strategy=way.label,
        workers=workers,
        seconds=world.now_s,
        updates=stats["updates"],
        samples=stats["samples"],
        updates_per_s=stats["updates"] / seconds,
        samples_per_s=per_s,
        efficiency=per_s / (ideal * plan.batch_size),
        waiting_share=sum(stats["waiting_share"]) / workers,
        network_share=world.network_s / (seconds * workers),
        dropped=sum(stats.get("dropped", [])),
        interrupted=world.interrupted,
        staleness_mean=ledger.mean_age(),
        staleness_median=ledger.age_quantile(0.5),
        staleness_p99=ledger.age_quantile(0.99),
        staleness_max=stats["staleness"]["max"],
        staleness=dict(sorted(ledger.ages.items())),
        loss=world.curve.points(),
        events_per_s=world.events / took_s,
    )
