"""Measure a small step by cause, under each strategy, against Lightning's single device.

    python scripts/step_costs.py [strategies=hybrid,async,hogwild] [workers=2] [seconds=3]
                                 [data=samples|batches] [doc=FILE]

A network of 128-256-256-10, mini-batches of 32, workers with one thread each. ``data=samples``: a
data set of single samples, fused Adam, a callback that reads the clock; ``batches``: whole
mini-batches, plain Adam. Every strategy is trained twice. Without a profiler: what the kernel
counts of a worker (computing, waiting for a core, asleep) and of the server, messages, switches.
With one: where a worker's step goes. ``doc`` writes both tables there. Needs Linux.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import pytorch_lightning as pl
import torch
from benchmarks.jobs.loops import strategy_named, trainer
from benchmarks.jobs.models import MODELS, Trained, loader
from benchmarks.machine import in_short, machine

from hybridtrain import StepProfiler
from hybridtrain.cli.quiet import hush_lightning
from hybridtrain.engine.policies.registry import STRATEGIES as NAMES
from hybridtrain.engine.profiling.time_spans import MEANINGS, Phase
from hybridtrain.engine.worlds.channel import Channel
from hybridtrain.errors import UserError
from hybridtrain.util.arguments import command, options

MODEL, FIRST = "mlp-small", 100  # steps that do not count
KNOWN = ("strategies", "workers", "seconds", "data", "doc")
STEP = "a worker's step"
STRATEGIES = "hybrid,ssp,async,hogwild,local_sgd"
PHASES = [p for p in Phase if p not in (Phase.VALIDATION, Phase.CHECKPOINT, Phase.SERVE)]


def times_of(process: int) -> tuple[float, float]:
    """Seconds on a core, and seconds of waiting for one, of all threads."""
    threads = Path(f"/proc/{process}/task").iterdir()
    told = [(thread / "schedstat").read_text().split() for thread in threads]
    return sum(int(t[0]) for t in told) / 1e9, sum(int(t[1]) for t in told) / 1e9


def switches_of(process: int) -> int:
    """How often the process has gone to sleep."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("voluntary"))


class Clock(pl.Callback):
    """Reads the clock at the end of each mini-batch, as users do."""

    at_s = 0.0

    def on_train_batch_end(self, *_: Any) -> None:
        self.at_s = time.perf_counter()


class Costs(pl.Callback):
    """Counts in every worker, from the beginning of one step to that of another."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.n, self.counts = folder, 0, Counter[str]()

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        line = getattr(getattr(trainer.strategy, "client", None), "line", None)
        if isinstance(line, Channel):
            self._count(line)

    def _count(self, line: Channel) -> None:
        send, receive, counts = line.send, line.receive, self.counts

        def sent(message: Any, *more: Any) -> None:
            counts["sent"] += 1
            send(message, *more)

        def received() -> Any:
            counts["received"] += 1
            return receive()

        line.send, line.receive = sent, received  # type: ignore[method-assign]

    def on_train_batch_start(self, *_: Any) -> None:
        self.n += 1
        if self.n == FIRST:
            self.before = self._seen()
        if self.n > FIRST:
            self.ended = time.perf_counter()

    def _seen(self) -> dict[str, float]:
        own, (server_s, _) = times_of(os.getpid()), times_of(os.getppid())
        return {
            "wall": time.perf_counter(),
            "cpu": own[0],
            "queued": own[1],
            "server_cpu": server_s,
            "sleeps": switches_of(os.getpid()),
            "server_sleeps": switches_of(os.getppid()),
            **{name: self.counts[name] for name in ("sent", "received")},
        }

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        after = self._seen() | {"wall": self.ended}
        n = self.n - FIRST
        each = {name: (after[name] - self.before[name]) / n for name in after}
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(each))


def trained(name: str, workers: int, seconds: float, samples: bool, profiled: bool) -> Any:
    """Train; return the counts, or the profile, of all workers."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        callbacks: list[pl.Callback] = [] if profiled else [Costs(place)]
        callbacks += [Clock()] if samples else []
        profiler = StepProfiler(place, quiet=True) if profiled else None
        fitting = trainer(strategy_named(name), workers, *callbacks, profiler=profiler)
        steps = MODELS[MODEL].steps(seconds, FIRST + 50)
        data = loader(MODEL, steps, workers, samples)
        fitting.fit(Trained(MODEL, True if samples else None), data)
        if profiled:
            return json.loads((place / "profile.json").read_text())
        return [json.loads(each.read_text()) for each in sorted(place.glob("*.json"))]


def mean(rows: Sequence[dict[str, float]], name: str) -> float:
    return statistics.mean(row[name] for row in rows)


def counted(rows: Sequence[dict[str, float]], alone: bool) -> list[str]:
    """One row of the first table, in microseconds and numbers a step."""
    wall, cpu, queued = (1e6 * mean(rows, name) for name in ("wall", "cpu", "queued"))
    # Of all workers' steps: the server is one for all, and each has counted all that it did.
    server = 0.0 if alone else 1e6 * mean(rows, "server_cpu")
    asleep = max(0.0, wall - cpu - queued)
    numbers = [mean(rows, name) for name in ("sent", "received", "sleeps")]
    numbers.append(0.0 if alone else mean(rows, "server_sleeps"))
    times = [f"{each:,.0f}" for each in (wall, cpu, queued, asleep, server)]
    return times + [f"{each:.2f}" for each in numbers]


def by_phase(profile: dict[str, Any]) -> list[str]:
    workers = profile["workers"].values()
    told = [[w["phases"].get(str(p), {}).get("us_per_step", 0.0) for w in workers] for p in PHASES]
    return [f"{statistics.mean(each):,.0f}" for each in told]


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def run(arguments: Sequence[str]) -> None:
    given = {"strategies": STRATEGIES, "workers": "2", "seconds": "3", "data": "batches", "doc": ""}
    given |= options(arguments, KNOWN)
    names, numbers = given["strategies"].split(","), (given["workers"], given["seconds"])
    if given["data"] not in ("samples", "batches") or not all(map(str.isdecimal, numbers)):
        raise UserError("give data=samples or data=batches, and whole numbers: workers=2 seconds=3")
    if unknown := set(names) - set(NAMES):
        raise UserError(f"{min(unknown)} was given; known are {', '.join(NAMES)}")
    if not Path("/proc/self/schedstat").exists():
        raise UserError("this system does not say what a process has waited for; use Linux")
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    hush_lightning()
    torch.set_num_threads(1)
    ways = [("single", 1), ("hybrid", 1)]
    ways += [(name, int(given["workers"])) for name in names]
    first, second = [], []
    for name, workers in ways:
        label = "one device" if name == "single" else f"`{name}`, {workers}"
        rest = workers, float(given["seconds"]), given["data"] == "samples"
        first.append([label, *counted(trained(name, *rest, False), name == "single")])
        second.append([label, *by_phase(trained(name, *rest, True))])
        print(*first[-1], sep="  ", file=sys.stderr, flush=True)
    text = shown(first, second, given)
    print(text)
    if given["doc"]:
        Path(given["doc"]).write_text(text)


def shown(first: list[list[str]], second: list[list[str]], given: dict[str, str]) -> str:
    counts = [STEP, "together", "computing", "waiting for a core", "asleep", "server computing"]
    counts += ["sent", "received", "worker falls asleep", "server falls asleep"]
    meanings = [f"- *{phase}*: {MEANINGS[phase]}." for phase in PHASES]
    parts = [
        "# What a small step costs, by cause",
        f"{in_short(machine())}; `python scripts/step_costs.py data={given['data']}`. "
        "The first row is the floor: Lightning's loop, forward, backward and the optimizer.",
        "## As the kernel counts it",
        table(counts, first),
        "Microseconds, and numbers a step. What the server computes and how often it falls asleep "
        "is for all workers, in the time of a worker's step.",
        "## Where a worker's step goes",
        table([STEP, *map(str, PHASES)], second),
        "\n".join(meanings),
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(command(run, __doc__, None))
