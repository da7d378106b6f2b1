"""What is to be simulated, and the figures that come of it."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from hybridtrain.errors import UserError
from hybridtrain.exchanges import ExchangeSpec, make_exchange
from hybridtrain.policies import make_policy
from hybridtrain.updates.named import UpdateSpec, make_update
from hybridtrain.updates.staleness import CorrectionSpec, make_correction
from hybridtrain.worlds.virtual.conditions import Conditions
from hybridtrain.worlds.virtual.service_times import ServiceTimes, Times
from hybridtrain.worlds.virtual.training_task import MakeOptimizer, Task
from hybridtrain.worlds.virtual.virtual_world import VirtualWorld

# Number of workers -> a fresh task, and what makes its optimizer.
Train = Callable[[int], tuple[Task, MakeOptimizer]]


@dataclass(frozen=True)
class Way:
    """A strategy as the user wrote it, and the policy, exchange and update that this means."""

    label: str
    given: Any
    exchange: ExchangeSpec = None  # what goes with the policy
    update: UpdateSpec = None  # what goes with the exchange


HYBRID, ASYNC = Way("hybrid", "hybrid"), Way("async", "async")


@dataclass(frozen=True)
class SimulationPlan:
    """What is to be simulated: every strategy with every number of workers.

    Each ends after ``mini_batches`` of all workers together, or ``seconds`` of virtual time, what
    comes first; ``None``: after the epochs of what it trains. ``train``: with real gradients.
    """

    strategies: tuple[Way, ...] = (HYBRID, ASYNC)
    workers: tuple[int, ...] = (8,)
    times: Times = field(default_factory=ServiceTimes)
    slower: Mapping[int, float] = field(default_factory=dict)  # as it is in ``times``
    conditions: Conditions = field(default_factory=Conditions)
    batch_size: int = 32
    mini_batches: float | None = 20_000
    seconds: float = math.inf
    seed: int = 0
    train: Train | None = None
    correction: CorrectionSpec = None
    exchange: ExchangeSpec = None  # what goes with the policy
    update: UpdateSpec = None  # what goes with the strategy


@dataclass(frozen=True)
class SimulationRow:
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
    sent_bytes: int = 0  # that workers have handed over
    loss_over_bytes: list[tuple[float, float]] = field(default_factory=list)  # (so far, mean loss)


def simulate(plan: SimulationPlan, way: Way, workers: int) -> SimulationRow:
    """One run in virtual time, as long as the plan says.

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
    world, epochs = _world(plan, way, workers)
    mini_batches = math.inf if plan.mini_batches is None else plan.mini_batches
    with _unswept():
        began = time.process_time()
        world.run(until_s=plan.seconds, mini_batches=mini_batches, epochs=epochs)
        took_s = time.process_time() - began
    return _row(plan, way, world, took_s)


@contextmanager
def _unswept() -> Iterator[None]:
    """Keep the garbage collector from searching what will not become garbage: all the workers.

    With 10,000 of them a third of the time went into that.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _world(plan: SimulationPlan, way: Way, workers: int) -> tuple[VirtualWorld, float]:
    """And the epochs that it is to last."""
    make = partial(
        VirtualWorld, make_policy(way.given), workers, plan.times, plan.batch_size, plan.seed
    )
    if plan.train is None:
        if way.exchange is not None:
            raise UserError(
                f"strategy={way.label} was given without task=...; its workers train on their own, "
                "so there must be something to train"
            )
        return make(conditions=plan.conditions), math.inf
    exchange = plan.exchange if way.exchange is None else way.exchange
    task, optimizer = plan.train(workers)
    size_bytes = sum(value.numel() * value.element_size() for value in task.parameters())
    network = replace(plan.conditions.network, size_bytes=size_bytes)
    world = make(
        task=task,
        optimizer=optimizer,
        conditions=replace(plan.conditions, network=network),
        correction=make_correction(plan.correction),
        exchange=None if exchange is None else make_exchange(exchange),
        update=make_update(way.update if plan.update is None else plan.update),
    )
    wanted = getattr(task, "epochs", math.inf) if plan.mini_batches is None else math.inf
    return world, wanted


def _row(plan: SimulationPlan, way: Way, world: VirtualWorld, took_s: float) -> SimulationRow:
    statistics, stats = world.server.statistics, world.server.statistics.stats()
    workers = statistics.n_workers
    ideal = sum(1 / plan.times.expected_s(worker) for worker in range(workers))
    seconds = world.now_s or math.inf
    dropped = sum(stats["dropped"])
    return SimulationRow(
        strategy=way.label,
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
        sent_bytes=sum(server.statistics.sent_bytes for server in world.servers),
        loss_over_bytes=world.curve.over_bytes(),
    )
