"""A long run in which something goes wrong every few seconds."""

from __future__ import annotations

import mmap
import os
import random
import signal
import struct
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hybridtrain import HybridStrategy
from hybridtrain.engine.recovery import failure_policy
from trials import work
from trials.apart import members, run_apart
from trials.tap import Tap, tapped

SIZE = work.Size(workers=3, samples=960, batch=8, step_s=0.02)
HANG_S, GRACE_S, BACK_OFF_S = 5.0, 10.0, 0.5
_TRIAL_S = 30.0  # the first of two short runs before a long one
STUCK_S = 60.0  # without an update: the run hangs
# What goes wrong, and how often beside the others.
SHARES = {
    ("kill", "compute"): 3,
    ("kill", "push"): 2,
    ("kill", "update"): 2,
    ("kill", "pull"): 2,
    ("exit", "compute"): 1,
    ("exception", "compute"): 2,
    ("oom", "compute"): 1,
    ("hang", "compute"): 1,
    ("hang", "push"): 1,
    ("slow", "compute"): 2,
}


@dataclass
class Soaked:
    """The outcome of one run. ``missing`` and ``twice``: samples, over all epochs."""

    strategy: str
    epochs: int
    disturbed: bool
    outcome: str = "hung"
    error: str = ""
    wall_s: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)
    verdicts: dict[str, int] = field(default_factory=dict)
    updates: int = 0
    missing: int = 0
    twice: int = 0
    loss: float | None = None
    left: list[str] = field(default_factory=list)
    fault_at_s: float | None = None  # of the first, where it is done from outside
    output: str = ""
    seed: int = work.SEED


BATCHES = SIZE.samples // SIZE.batch  # of an epoch


def rates(every_steps: float, strategy: str = "hybrid") -> list[dict[str, Any]]:
    """Faults at random, one in about so many steps of all workers."""
    total = sum(SHARES.values()) * every_steps
    return [
        {"kind": kind, "phase": phase, "rate": share / total, "seed": number}
        for number, ((kind, phase), share) in enumerate(SHARES.items())
        if (strategy, phase) != ("hogwild", "update")  # there workers make updates themselves
    ]


@dataclass(frozen=True)
class Wish:
    """How long a run is to be (``seconds``, or ``epochs``), and one fault in how many steps."""

    seconds: float | None = None
    epochs: int = 0
    every_steps: float | None = None
    seed: int = work.SEED
    step_s: float = SIZE.step_s
    at_once: int = 1  # workers that are killed together, every ``crowd_s``
    crowd_s: float = 5.0


def is_lockstep(strategy: str) -> bool:
    """Whether all workers make each step together, so that nothing hangs on who is late."""
    return bool(HybridStrategy(strategy).policy.begin(SIZE.workers).whole_rounds)


def soak(strategy: str, wish: Wish) -> Soaked:
    """One run, in processes of its own."""
    made = Soaked(strategy, wish.epochs, wish.every_steps is not None, seed=wish.seed)
    shared = mmap.mmap(-1, 8)  # no file: a busy disk would hold the server up
    watch = _Watch(shared, wish)
    ending = run_apart(lambda f: _run(made, wish, f, shared), 24 * 3600.0, watch)
    found: Soaked = ending.result or made
    if watch.struck:
        found.faults[f"kill of {wish.at_once} at once"] = watch.struck
    found.wall_s, found.left = round(ending.wall_s, 1), ending.left
    found.output = "" if found.outcome == "finished" else ending.output[-4000:]
    return found


def pace(strategy: str, every_s: float, seconds: float, at_once: int = 1) -> Wish:
    """A run of that length with a fault in about so many seconds.

    Faults are drawn by the step, and each takes time in which no steps are made: two short runs say
    how many steps there are in a second, and how long a fault takes.
    """
    calm = soak(strategy, Wish(min(_TRIAL_S, seconds)))
    in_second = calm.epochs * BATCHES / calm.wall_s
    rough = soak(strategy, Wish(min(2 * _TRIAL_S, seconds), every_steps=every_s * in_second / 2))
    lost_s = rough.wall_s - rough.epochs * BATCHES / in_second
    fault_s = lost_s / max(1, sum(rough.faults.values()))
    every_steps = max(BATCHES / 8, (every_s - fault_s) * in_second)
    return Wish(seconds, every_steps=every_steps, at_once=at_once, crowd_s=4 * every_s)


class _Watch:
    """Gives a run up that makes no update any more; kills several workers at once."""

    def __init__(self, shared: mmap.mmap, wish: Wish) -> None:
        self._shared, self._last, self._since_s = shared, b"", time.monotonic()
        self._wish, self._rng, self.struck = wish, random.Random(wish.seed), 0
        self._strike_at_s = time.monotonic() + wish.crowd_s

    def _strike(self, session: int) -> None:
        there = sorted(set(members(session)) - {session})
        if self._wish.at_once < 2 or len(there) < SIZE.workers:
            return
        for pid in self._rng.sample(there, self._wish.at_once):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.struck += 1

    def __call__(self, session: int, folder: Path) -> bool:
        if (now := self._shared[:]) != self._last:
            self._last, self._since_s = now, time.monotonic()
        if time.monotonic() > self._strike_at_s:
            self._strike_at_s = time.monotonic() + self._wish.crowd_s
            self._strike(session)
        time.sleep(0.2)
        return time.monotonic() - self._since_s < STUCK_S


def _run(made: Soaked, wish: Wish, folder: Path, shared: mmap.mmap) -> Soaked:
    torch.set_num_threads(1)
    failure_policy._LONGEST_DELAY_S = BACK_OFF_S  # or most workers would be away most of the time
    size = work.Size(SIZE.workers, SIZE.samples, SIZE.batch, made.epochs, wish.step_s)
    taps: list[Tap] = []
    work.LISTENERS.append(lambda d: taps.append(_told(shared, tapped(False, d, keeps=False))))
    options: dict[str, Any] = {"on_failure": "restart", "max_restarts": None}
    options |= {"stop_grace_s": GRACE_S, "hang_timeout_s": HANG_S, "checkpoint": "background"}
    if wish.every_steps is not None:
        options["faults"] = rates(wish.every_steps, made.strategy)
    options |= {"seed": wish.seed, "keep": 1, "seconds": wish.seconds}
    try:
        _, trainer = work.train(made.strategy, size, folder, **options)
        made.outcome, made.loss = "finished", float(trainer.callback_metrics["val/loss"])
        made.epochs = trainer.current_epoch
    except BaseException as error:
        made.outcome, made.error = "ended", f"{type(error).__name__}: {error}"[:300]
    stats = work.OBSERVED[-1].strategy.run_stats()
    made.updates = int(stats.get("updates", 0))
    for row in stats.get("faults", []):
        name = f"{row['kind']} in {row['phase']}"
        made.faults[name] = made.faults.get(name, 0) + row["count"]
    made.verdicts = dict(Counter(taps[0].verdicts))
    wanted = Counter(dict.fromkeys(range(size.samples), made.epochs))
    used = taps[0].used()
    made.missing, made.twice = (wanted - used).total(), (used - wanted).total()
    if made.strategy == "hogwild":  # what was counted and not stepped is done again, as it says
        more = int(stats.get("samples", 0)) - size.samples * made.epochs
        made.missing, made.twice = max(0, -more), max(0, more)
    return made


def _told(shared: mmap.mmap, tap: Tap) -> Tap:
    """Each update shows from outside."""
    count = tap.take

    def telling(parts: Any, rounds: Any) -> None:
        count(parts, rounds)
        struct.pack_into("d", shared, 0, time.monotonic())

    tap.take = telling  # type: ignore[method-assign]
    return tap


# ---- the same with Lightning's ddp --------------------------------------------------------------


def disturb_ddp(epochs: int, signum: int, after_s: float, limit_s: float) -> Soaked:
    """One of its ranks is killed or stopped; give it so long to notice."""
    made = Soaked("ddp", epochs, True)
    striker = _Striker(signum, after_s, limit_s)
    ending = run_apart(lambda f: _run_ddp(made, f), 24 * 3600.0, striker)
    found: Soaked = ending.result or made
    found.wall_s, found.left, found.fault_at_s = ending.wall_s, ending.left, striker.struck_s
    found.faults = {signal.Signals(signum).name: int(striker.struck_s is not None)}
    found.output = ending.output[-4000:]
    return found


class _Striker:
    """Hits one rank, once."""

    def __init__(self, signum: int, after_s: float, limit_s: float) -> None:
        self._signum, self._after_s, self._limit_s = signum, after_s, limit_s
        self._began_s = time.monotonic()
        self.struck_s: float | None = None  # after the beginning

    def __call__(self, session: int, folder: Path) -> bool:
        time.sleep(0.1)
        now_s = time.monotonic() - self._began_s
        if self.struck_s is None and now_s > self._after_s:
            ranks = sorted(set(members(session)) - {session})
            if len(ranks) >= SIZE.workers:
                self.struck_s = now_s
                os.kill(random.Random(0).choice(ranks[1:]), self._signum)
        return self.struck_s is None or now_s - self.struck_s < self._limit_s


def _run_ddp(made: Soaked, folder: Path) -> Soaked:
    torch.set_num_threads(1)
    size = work.Size(SIZE.workers, SIZE.samples, SIZE.batch, made.epochs, SIZE.step_s)
    try:
        work.train("ddp", size, folder, keep=1)
        made.outcome = "finished"
    except BaseException as error:
        made.outcome, made.error = "ended", f"{type(error).__name__}: {error}"[:300]
    return made
