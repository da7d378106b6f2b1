"""Measure watching the workers: microseconds of its parts, and of a step with and without it.

    python scripts/costs/watch.py [--repeats 6]

First the parts: a word on the pulse (two in a training step, in the worker) and a look at four
workers (one a second, in the parent). Then the digits are trained side by side, alternately with
and without (A B B A A B ...): what the parts are of a step; speed; processor time of parent and
workers together, which other load on the machine changes less; and the same of runs that are both
without, which says what such a ratio is worth. Without: no pulse, no looks, no report of slow
workers.
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import timeit
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from costs.training import fit, pairs_asked_for
from hybridtrain import HybridStrategy
from hybridtrain.engine.monitoring.hang_detector import (
    Doing,
    HangTimeout,
    Heartbeat,
    heartbeat_file,
)
from hybridtrain.engine.monitoring.watchdog import SlowReport, Watchdog
from hybridtrain.tasks.digits import DigitsData, DigitsModule


def main() -> int:
    """Print all."""
    repeats = pairs_asked_for(__doc__, 6)
    word, look = word_us(), look_us()
    print(f"a word on the pulse: {word:.2f} µs; a look at four workers: {look:.0f} µs", flush=True)
    for policy in ("hybrid", "async"):
        print(f"{policy:8}" + side_by_side(policy, repeats, 2 * word, look), flush=True)
    return 0


def word_us() -> float:
    """In the worker."""
    heartbeat = Heartbeat(heartbeat_file())
    return (
        1e6
        * min(timeit.repeat(lambda: heartbeat.beat(Doing.STEP), number=10_000, repeat=9))
        / 10_000
    )


@dataclass
class Stub:
    """Looks like a worker process that computes."""

    number: int
    pid: int = field(default_factory=os.getpid)
    heard: int = 0
    asked: str = ""
    heartbeat: Heartbeat = field(default_factory=lambda: Heartbeat(heartbeat_file()))

    def kill(self, cause: str) -> None:
        """It never comes to that."""
        raise AssertionError(cause)


def look_us() -> float:
    """In the parent."""
    watchdog, workers, now_s = Watchdog(HangTimeout()), [Stub(n) for n in range(4)], 0.0

    def look() -> None:
        nonlocal now_s
        now_s += 1.0
        for worker in workers:
            worker.heartbeat.beat(Doing.STEP)
        watchdog.look(now_s, workers)

    return 1e6 * min(timeit.repeat(look, number=1000, repeat=9)) / 1000


@dataclass(frozen=True)
class Done:
    """Figures of one run; ``busy_s``: processor time of all its processes."""

    samples_per_s: float
    step_s: float
    busy_s: float


def side_by_side(policy: str, repeats: int, in_step_us: float, in_second_us: float) -> str:
    """Alternating runs."""
    speed, busy, null, shares = [], [], [], []
    for repeat in range(repeats):
        order = ["with", "without", "again"]
        done = {how: digits(policy, how == "with") for how in order[:: -1 if repeat % 2 else 1]}
        speed.append(done["with"].samples_per_s / done["without"].samples_per_s)
        busy.append(done["with"].busy_s / done["without"].busy_s)
        null.append(done["again"].busy_s / done["without"].busy_s)
        shares.append(1e-4 * (in_step_us / done["with"].step_s + in_second_us))
    return (
        f"the parts: {statistics.median(shares):.3f} % of a step; with / without: speed "
        f"{_spread(speed)}, processor time {_spread(busy)}; without / without: {_spread(null)}"
    )


def _spread(ratios: list[float]) -> str:
    low, high = min(ratios), max(ratios)
    return f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})"


def digits(policy: str, watched: bool) -> Done:
    """Twelve epochs of 48 mini-batches."""
    before_s = _processor_s()
    with _unwatched(not watched):
        strategy = HybridStrategy(policy, hang_timeout_s="auto" if watched else None)
        module = DigitsModule(optimizer=partial(torch.optim.Adam, lr=0.002))
        stats = fit(strategy, module, DigitsData(batch_size=30), 12)
    busy_s = _processor_s() - before_s
    return Done(stats["samples_per_s"], statistics.mean(stats["step_s"]), busy_s)


def _processor_s() -> float:
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, whose))


@contextmanager
def _unwatched(really: bool) -> Iterator[None]:
    """Whoever is forked meanwhile has no pulse, and nobody looks."""
    changed: list[tuple[Any, str]] = [
        (Heartbeat, "beat"),
        (Heartbeat, "tell_stacks"),
        (SlowReport, "look"),
        (SlowReport, "conclude"),
    ]
    former = [getattr(owner, name) for owner, name in changed]
    for owner, name in changed if really else []:
        setattr(owner, name, lambda *_: None)
    try:
        yield
    finally:
        for (owner, name), method in zip(changed, former, strict=True):
            setattr(owner, name, method)


if __name__ == "__main__":
    sys.exit(main())
