"""What watching the workers costs: microseconds of its parts, and of a step, with and without it.

    python scripts/watch_cost.py [--repeats 6]

First the parts: a word on the pulse (two in a training step, in the worker) and a look at four
workers (one a second, in the parent). Then the digits are trained side by side, alternately with
and without (A B B A A B ...): speed, and processor time of parent and workers together, which other
load on the machine changes less. Without: no pulse, no looks, no report of slow workers.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import statistics
import sys
import timeit
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch

from hybridtrain import HybridStrategy
from hybridtrain.pulse import Doing, Pulse, pulse_file
from hybridtrain.slowness import SlowReport
from hybridtrain.tasks.digits import DigitsData, DigitsModule
from hybridtrain.worlds.hanging import Patience
from hybridtrain.worlds.watchman import Watchman


def main() -> int:
    """Print all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=6, help="pairs of runs (default 6)")
    repeats = parser.parse_args().repeats
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    print(f"a word on the pulse: {word_us():.2f} µs; a look at four workers: {look_us():.0f} µs")
    for policy in ("hybrid", "async"):
        print(f"{policy:8}" + side_by_side(policy, repeats), flush=True)
    return 0


def word_us() -> float:
    """In the worker."""
    pulse = Pulse(pulse_file())
    return (
        1e6 * min(timeit.repeat(lambda: pulse.beat(Doing.STEP), number=10_000, repeat=9)) / 10_000
    )


@dataclass
class Stub:
    """Looks like a worker process that computes."""

    number: int
    pid: int = field(default_factory=os.getpid)
    heard: int = 0
    asked: str = ""
    pulse: Pulse = field(default_factory=lambda: Pulse(pulse_file()))

    def kill(self, cause: str) -> None:
        """It never comes to that."""
        raise AssertionError(cause)


def look_us() -> float:
    """In the parent."""
    watchman, workers, now_s = Watchman(Patience()), [Stub(n) for n in range(4)], 0.0

    def look() -> None:
        nonlocal now_s
        now_s += 1.0
        for worker in workers:
            worker.pulse.beat(Doing.STEP)
        watchman.look(now_s, workers)

    return 1e6 * min(timeit.repeat(look, number=1000, repeat=9)) / 1000


def side_by_side(policy: str, repeats: int) -> str:
    """Alternating runs."""
    speed, busy = [], []
    for repeat in range(repeats):
        order = [True, False] if repeat % 2 else [False, True]
        done = {watched: digits(policy, watched) for watched in order}
        speed.append(done[True][0] / done[False][0])
        busy.append(done[True][1] / done[False][1])
    pairs = " ".join(f"{ratio:.3f}" for ratio in busy)
    return (
        f"speed with / without: {statistics.median(speed):.3f}; processor time with / without: "
        f"{statistics.median(busy):.4f} ({pairs})"
    )


def digits(policy: str, watched: bool) -> tuple[float, float]:
    """Samples a second, and processor seconds, of twelve epochs of 48 mini-batches."""
    pl.seed_everything(0, verbose=False)
    before_s = _processor_s()
    with _unwatched(not watched):
        trainer = pl.Trainer(
            strategy=HybridStrategy(policy, hang_timeout_s="auto" if watched else None),
            accelerator="cpu",
            devices=2,
            max_epochs=12,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = DigitsModule(optimizer=partial(torch.optim.Adam, lr=0.002))
        trainer.fit(module, DigitsData(batch_size=30))
    stats = trainer.strategy.run_stats()  # type: ignore[attr-defined]
    return stats["samples_per_s"], _processor_s() - before_s


def _processor_s() -> float:
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, whose))


@contextmanager
def _unwatched(really: bool) -> Iterator[None]:
    """Whoever is forked meanwhile has no pulse, and nobody looks."""
    changed: list[tuple[Any, str]] = [
        (Pulse, "beat"),
        (Pulse, "tell_stacks"),
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
