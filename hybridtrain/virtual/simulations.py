"""Run strategies in virtual time and collect their figures."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from hybridtrain.engine.exchanges import (
    ExchangeSpec,
    Requirements,
    begin_policy,
    evaluates,
    exchange_of,
    make_exchange,
)
from hybridtrain.engine.policies import make_policy
from hybridtrain.engine.server.timeline import Timeline
from hybridtrain.engine.updates.named import UpdateSpec, make_update
from hybridtrain.engine.updates.staleness import CorrectionSpec, make_correction
from hybridtrain.errors import UserError
from hybridtrain.virtual.network import Conditions
from hybridtrain.virtual.service_times import ServiceTimes, Times
from hybridtrain.virtual.training_task import MakeOptimizer, Task
from hybridtrain.virtual.virtual_world import VirtualWorld

# Number of workers -> a fresh task, and a function that makes its optimizer.
Train = Callable[[int, Requirements], tuple[Task, MakeOptimizer]]


@dataclass(frozen=True)
class StrategySpec:
    """A strategy: its ``label`` as the user wrote it, policy, exchange and update."""

    label: str
    policy: Any
    exchange: ExchangeSpec = None  # default: the policy's
    update: UpdateSpec = None  # default: the exchange's


@dataclass(frozen=True)
class SimulationPlan:
    """Simulate every strategy with every number of workers, on as many ``hosts`` each.

    Each run ends after ``mini_batches`` of all workers together (``None``: after the task's epochs)
    or ``seconds`` of virtual time, whichever is first. ``train`` makes the task, if there is one.
    """

    strategies: tuple[StrategySpec, ...] = tuple(StrategySpec(x, x) for x in ("hybrid", "async"))
    workers: tuple[int, ...] = (8,)
    hosts: tuple[int, ...] = (1,)
    times: Times = field(default_factory=ServiceTimes)
    conditions: Conditions = field(default_factory=Conditions)
    batch_size: int = 32
    mini_batches: float | None = 20_000
    seconds: float = math.inf
    seed: int = 0
    train: Train | None = None
    correction: CorrectionSpec = None
    exchange: ExchangeSpec = None  # default: the policy's
    update: UpdateSpec = None  # default: the strategy's
    epoch: int | None = None  # samples after which all meet, without a task


@dataclass(frozen=True)
class SimulationRow:
    """Figures of one strategy with one number of workers. Seconds are virtual.

    Shares of time are means over the workers: waiting for a release, and on the network; the rest
    is computing or absence. ``staleness``: age in updates -> contributions. ``link_share``,
    ``update_share``: for which the server's link was busy (in the direction with more to do), and
    the server with updates.
    """

    strategy: str
    workers: int
    seconds: float
    updates: int
    samples: int
    updates_per_s: float
    samples_per_s: float
    efficiency: float  # relative to the sum of the workers' own speeds
    waiting_share: float
    network_share: float
    dropped: int  # contributions that did not count
    interrupted: int  # mini-batches abandoned and begun anew
    staleness_mean: float
    staleness_median: int
    staleness_p99: int
    staleness_max: int
    staleness: dict[int, int]
    loss: list[tuple[float, float]]  # (virtual time, mean of the losses around it)
    events_per_s: float  # mini-batches per second of this process's processor time
    sent_bytes: int = 0  # handed over by all workers
    loss_over_bytes: list[tuple[float, float]] = field(default_factory=list)  # (bytes, mean loss)
    hosts: int = 1
    link_share: float = 0.0
    update_share: float = 0.0


def simulate(
    plan: SimulationPlan,
    spec: StrategySpec,
    workers: int,
    timeline: Timeline | None = None,
    hosts: int = 1,
) -> SimulationRow:
    """Simulate one run of the plan on so many hosts, and fill the timeline.

    Raises:
        UserError: if the policy does not fit this number of workers, or the plan names a worker
            that does not exist.
    """
    for worker in plan.times.slower:
        if worker >= workers:
            raise UserError(
                f"slower.{worker} was given, but {workers} workers have the numbers 0 to "
                f"{workers - 1}"
            )
    network = replace(plan.conditions.network, hosts=hosts)
    plan = replace(plan, conditions=replace(plan.conditions, network=network))
    world, epochs = _world(plan, spec, workers, timeline)
    mini_batches = math.inf if plan.mini_batches is None else plan.mini_batches
    gc.freeze()  # it would scan the workers: a third of the time with 10,000
    try:
        began = time.process_time()
        world.run(until_s=plan.seconds, mini_batches=mini_batches, epochs=epochs)
        took_s = time.process_time() - began
    finally:
        gc.unfreeze()
    if timeline is not None:
        world.server.statistics.end_timeline(min(plan.seconds, world.next_s))
    return _row(plan, spec.label, world, took_s)


def _world(
    plan: SimulationPlan, spec: StrategySpec, workers: int, timeline: Timeline | None
) -> tuple[VirtualWorld, float]:
    """The world of one run, and the number of epochs to simulate."""
    policy = deepcopy(make_policy(spec.policy))  # an object that was given stays as it is
    make = partial(
        VirtualWorld, policy, workers, plan.times, plan.batch_size, plan.seed, timeline=timeline
    )
    if plan.train is None:
        if spec.exchange is not None or evaluates(exchange_of(policy)):
            raise UserError(
                f"strategy={spec.label} was given without task=...; its workers train on their "
                "own, so there must be something to train"
            )
        return make(conditions=plan.conditions, epoch=plan.epoch), math.inf
    exchange = plan.exchange if spec.exchange is None else spec.exchange
    exchanged = exchange_of(policy) if exchange is None else make_exchange(exchange)
    wants = begin_policy(deepcopy(policy), exchanged, workers)
    task, optimizer = plan.train(workers, wants)
    size_bytes = sum(value.numel() * value.element_size() for value in task.parameters())
    network = replace(plan.conditions.network, size_bytes=size_bytes)
    world = make(
        task=task,
        optimizer=optimizer,
        conditions=replace(plan.conditions, network=network),
        correction=make_correction(plan.correction),
        exchange=None if exchange is None else make_exchange(exchange),
        update=make_update(spec.update if plan.update is None else plan.update),
    )
    wanted = getattr(task, "epochs", math.inf) if plan.mini_batches is None else math.inf
    return world, wanted


def _row(plan: SimulationPlan, label: str, world: VirtualWorld, took_s: float) -> SimulationRow:
    statistics, stats = world.server.statistics, world.server.statistics.stats()
    workers = statistics.n_workers
    ideal = sum(1 / plan.times.expected_s(worker) for worker in range(workers))
    seconds = world.now_s or math.inf
    dropped = sum(stats["dropped"])
    return SimulationRow(
        strategy=label,
        workers=workers,
        seconds=world.now_s,
        updates=stats["updates"],
        samples=stats["samples"],
        updates_per_s=stats["updates"] / seconds,
        samples_per_s=stats["samples"] / seconds,
        efficiency=(world.events - dropped) / seconds / ideal,
        waiting_share=sum(stats["waiting_share"]) / workers,
        network_share=world.network_s / (seconds * workers),
        dropped=dropped,
        interrupted=world.interrupted,
        staleness_mean=statistics.mean_age(),
        staleness_median=statistics.age_quantile(0.5),
        staleness_p99=statistics.age_quantile(0.99),
        staleness_max=stats["staleness"]["max"],
        staleness=dict(sorted(statistics.ages.items())),
        loss=world.curve.points(),
        events_per_s=world.events / took_s,
        sent_bytes=statistics.sent_bytes,
        loss_over_bytes=world.curve.over_bytes(),
        hosts=plan.conditions.network.hosts,
        link_share=min(1.0, world.links.server_s / seconds),
        update_share=stats["updates"] * plan.conditions.update_s / seconds,
    )
