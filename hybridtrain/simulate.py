"""What would it cost? Strategies in virtual time, with as many workers as you like.

    python -m hybridtrain.simulate strategy=hybrid,async workers=8,64,1000 [name=value ...]

Runs the same policy and server code as a training, on a clock that jumps from event to event, and
prints updates and samples per (virtual) second, the share of the workers' own speed that is left,
how long they wait, and how stale their gradients are. The same seed gives the same figures.

Options (several values: separated by commas, where it says so):
  strategy=NAME,...   hybrid, async (default both)
  workers=N,...       how many workers (default 8)
  compute=KIND        service time of a mini-batch: constant, exponential (default),
                      shifted_exponential, pareto, lognormal
  compute.mean_s=X    its mean in seconds (default 1)
  compute.shift=X     shifted_exponential: share of the mean that is always needed (default 0.5)
  compute.alpha=X     pareto: exponent of the tail (default 2.5)
  compute.sigma=X     lognormal: standard deviation of the logarithm (default 0.5)
  slower.W=X          worker W takes X times as long (may be given for several workers)
  batch_size=N        samples in a mini-batch (default 32)
  mini_batches=N      length of the run, in mini-batches of all workers together (default 20000)
  seed=N              of the service times (default 0)
  json=FILE           also write the figures to a file
  plot=FILE           also draw them (PNG, SVG or PDF; needs matplotlib, extra `report`)
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hybridtrain.command import command
from hybridtrain.errors import UserError
from hybridtrain.policies import make_policy
from hybridtrain.worlds.service import SHAPES, ServiceTimes
from hybridtrain.worlds.virtual import VirtualWorld

OPTIONS = ["strategy", "workers", "compute", "compute.mean_s", "compute.shift", "compute.alpha"]
OPTIONS += ["compute.sigma", "slower", "batch_size", "mini_batches", "seed", "json", "plot"]


@dataclass(frozen=True)
class Plan:
    """What is to be simulated: every strategy with every number of workers."""

    strategies: tuple[str, ...] = ("hybrid", "async")
    workers: tuple[int, ...] = (8,)
    times: ServiceTimes = field(default_factory=ServiceTimes)
    batch_size: int = 32
    mini_batches: int = 20_000
    seed: int = 0


@dataclass(frozen=True)
class Row:
    """What one strategy did with one number of workers. Seconds are virtual, but for the last."""

    strategy: str
    workers: int
    seconds: float
    updates: int
    samples: int
    updates_per_s: float
    samples_per_s: float
    efficiency: float  # of the sum of the workers' own speeds
    waiting_share: float  # mean over the workers
    staleness_mean: float
    staleness_median: int
    staleness_p99: int
    staleness_max: int
    events_per_s: float  # of this machine's time


def simulate(plan: Plan, strategy: str, workers: int) -> Row:
    """One run in virtual time, of at least ``plan.mini_batches`` mini-batches.

    Raises:
        UserError: if there is no such strategy, or a slower worker that is not there.
    """
    for worker in plan.times.slower:
        if worker >= workers:
            raise UserError(
                f"slower.{worker} was given, but {workers} workers have the numbers 0 to "
                f"{workers - 1}"
            )
    policy = make_policy(strategy)
    world = VirtualWorld(policy, workers, plan.times, plan.batch_size, plan.seed)
    began = time.perf_counter()
    while world.events < plan.mini_batches or world.server.ledger.version == 0:
        world.run(updates=world.server.ledger.version + 1)
    took_s = time.perf_counter() - began
    return _row(plan, strategy, workers, world, took_s)


def _row(plan: Plan, strategy: str, workers: int, world: VirtualWorld, took_s: float) -> Row:
    ledger, stats = world.server.ledger, world.server.ledger.stats()
    ideal = sum(1 / (plan.times.mean_s * plan.times.slower.get(w, 1.0)) for w in range(workers))
    per_s = stats["samples"] / world.now_s
    return Row(
        strategy=strategy,
        workers=workers,
        seconds=world.now_s,
        updates=stats["updates"],
        samples=stats["samples"],
        updates_per_s=stats["updates"] / world.now_s,
        samples_per_s=per_s,
        efficiency=per_s / (ideal * plan.batch_size),
        waiting_share=sum(stats["waiting_share"]) / workers,
        staleness_mean=ledger.mean_age(),
        staleness_median=ledger.age_quantile(0.5),
        staleness_p99=ledger.age_quantile(0.99),
        staleness_max=stats["staleness"]["max"],
        events_per_s=world.events / took_s,
    )


# ---- what the user says -------------------------------------------------------------------------


def parse(arguments: Sequence[str]) -> tuple[Plan, dict[str, Path]]:
    """A plan, and the files to write: ``json`` and ``plot``, if asked for.

    Raises:
        UserError: naming the option, what it may be, and what was meant.
    """
    given: dict[str, str] = {}
    for argument in arguments:
        name, separator, value = argument.partition("=")
        known = name.partition(".")[0] if name.startswith("slower.") else name
        if known not in OPTIONS or not separator or not value:
            close = get_close_matches(name, OPTIONS, n=1)
            hint = f" (did you mean {close[0]}=...?)" if close else ""
            raise UserError(f"{argument!r} was given{hint}; known are {', '.join(OPTIONS)}")
        given[name] = value
    strategies = tuple(given.get("strategy", "hybrid,async").split(","))
    for strategy in strategies:
        make_policy(strategy)
    plan = Plan(
        strategies=strategies,
        workers=tuple(_whole("workers", w) for w in given.get("workers", "8").split(",")),
        times=_times(given),
        batch_size=_whole("batch_size", given.get("batch_size", "32")),
        mini_batches=_whole("mini_batches", given.get("mini_batches", "20000")),
        seed=_whole("seed", given.get("seed", "0"), least=0),
    )
    return plan, {name: Path(given[name]) for name in ("json", "plot") if name in given}


def _times(given: Mapping[str, str]) -> ServiceTimes:
    kind = given.get("compute", "exponential")
    own = SHAPES[kind][0] if kind in SHAPES else ""
    for name in ("shift", "alpha", "sigma"):
        if f"compute.{name}" in given and name != own:
            raise UserError(f"compute.{name} was given, but compute={kind} has no such parameter")
    slower = {
        _whole("slower.W", name.removeprefix("slower."), least=0): _number(name, value)
        for name, value in given.items()
        if name.startswith("slower.")
    }
    mean_s = _number("compute.mean_s", given.get("compute.mean_s", "1"))
    shape = given.get(f"compute.{own}")
    return ServiceTimes(kind, mean_s, None if shape is None else _number(own, shape), slower)


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{name}={text} was given; it must be a number") from None


def _whole(name: str, text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise UserError(f"{name}={text} was given; it must be a whole number from {least} on")
    return int(text)


# ---- what the user sees -------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> Table:
    """One line for each run."""
    made = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    heads = ("strategy", "workers", "updates/s", "samples/s", "of ideal", "waiting")
    for head in (*heads, "stale", "99 %", "max"):
        made.add_column(head, justify="left" if head == "strategy" else "right", no_wrap=True)
    for row in rows:
        made.add_row(
            row.strategy,
            str(row.workers),
            _short(row.updates_per_s),
            _short(row.samples_per_s),
            f"{100 * row.efficiency:.1f} %",
            f"{100 * row.waiting_share:.1f} %",
            _short(row.staleness_mean),
            *map(str, (row.staleness_p99, row.staleness_max)),
        )
    return made


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Efficiency, waiting and staleness against the number of workers.

    Raises:
        UserError: if there is no matplotlib, or it cannot write such a file.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # no display, no global state
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise UserError(
            f"plot={path} was given, but matplotlib is not installed; pip install matplotlib, or "
            "use json=FILE"
        ) from error
    figure = Figure(figsize=(11, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels: list[tuple[str, Any]] = [
        ("share of the ideal speed", lambda row: row.efficiency),
        ("share of time spent waiting", lambda row: row.waiting_share),
        ("mean staleness in updates", lambda row: row.staleness_mean),
    ]
    for axes, (label, value) in zip(figure.subplots(1, 3), panels, strict=True):
        for strategy in dict.fromkeys(row.strategy for row in rows):
            own = sorted((r for r in rows if r.strategy == strategy), key=lambda r: r.workers)
            axes.plot([r.workers for r in own], [value(r) for r in own], "o-", label=strategy)
        axes.set(xlabel="workers", ylabel=label, xscale="log", ylim=(0, None))
    axes.legend(frameon=False)
    try:
        figure.savefig(path, dpi=120)
    except (ValueError, OSError) as error:
        raise UserError(f"plot={path} could not be written: {error}") from error


def run(arguments: Sequence[str]) -> None:
    """Simulate what is asked for, and show it."""
    plan, files = parse(arguments)
    console = Console()
    rows = []
    with console.status("") as status:
        for workers in plan.workers:
            for strategy in plan.strategies:
                status.update(f"{strategy}, {workers} workers")
                rows.append(simulate(plan, strategy, workers))
    console.print(table(rows))
    if "json" in files:
        files["json"].write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    if "plot" in files:
        draw(rows, files["plot"])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: 0, or 2 after one line on standard error."""
    return command(run, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
