"""Which strategy, on how many workers? Ranked from recorded runs, before machines are rented.

    python -m hybridtrain plan run=DIR[,DIR...] [hosts=1x4,1x4:slower=3,2x4] [name=value ...]

Takes the times in the record of a run and prints, for each strategy on each layout of hosts, how
many samples a second it would make, how long workers would wait, what would be its first
bottleneck, and what of that was not measured but extrapolated. With a target also the time to it,
as far as the runs tell: as a range, or not at all.

Options (several values: separated by commas, where it says so):
  run=DIR,...         directories of runs of python -m hybridtrain, of one model and one kind of
                      data; times are those of the run with the nearest number of workers. A
                      target needs validations in them; runs of two strategies, or of one with
                      two numbers of workers, narrow its range
  hosts=HxN,...       H hosts with N workers each, the first with the server; with options behind
                      colons: slower=3 (the last worker; slower.1=3: worker 1), cores=8 (of each
                      host), network.latency_s, network.bandwidth, network.server_bandwidth.
                      Default: the first run's own
  strategy=NAME,...   strategies, with their options behind colons (backup:k=3, local_sgd:every=32,
                      my.Mine:k=3 for a policy of one's own).
                      Default: hybrid,backup,k_async,k_batch_async,ssp,async,local_sgd
  target=METRIC:X     a validation metric that is to reach X: val/wer:0.1, or val/wer:0.1:min
  cores=N             of each host (default: as in the run)
  network.latency_s=X         of a message between hosts, one way, where hosts says nothing else
  network.bandwidth=X         bytes per second of each host's link
  network.server_bandwidth=X  of the first host's (default: as the others')
  top=N               rows to print (default 20); files have all
  quiet=true          print nothing

What to write:
  json=FILE           the figures
  html=FILE           a page with the table, and speed against staleness, or against time to target
                      (needs matplotlib, extra `report`)
"""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table

from hybridtrain.cli.commands import simulate_options as simulated
from hybridtrain.engine.scheme import usable_cores
from hybridtrain.errors import UserError
from hybridtrain.report import charts, page
from hybridtrain.report.charts import Series
from hybridtrain.report.page import Part, write
from hybridtrain.report.runs import as_json
from hybridtrain.util.arguments import command, options, read_value, split_values, value_of
from hybridtrain.util.option_types import Natural, Positive, Range, is_number
from hybridtrain.virtual.network import Network
from hybridtrain.virtual.plan.evidence import (
    MetricTarget,
    best_of,
    check_alike,
    directed,
    evidence,
)
from hybridtrain.virtual.plan.prediction import HostLayout, Plan, PlanRow

NETWORK = ("network.latency_s", *simulated.BANDWIDTHS)
_Bandwidth = Annotated[float, Range(1, infinite=True)]
OF_HOSTS: dict[str, Any] = {
    "network.latency_s": Annotated[float, Range(0, 3600)],
    **dict.fromkeys(simulated.BANDWIDTHS, _Bandwidth),
    "slower": Annotated[float, Range(0, 1000, open="(")],
    "cores": Positive,
}
TEXTS = ("run", "hosts", "strategy", "target", "json", "html")
OPTIONS: dict[str, Any] = {
    **dict.fromkeys(TEXTS, str),
    **{name: kind for name, kind in OF_HOSTS.items() if name != "slower"},
    "top": Positive,
    "quiet": bool,
}
STRATEGIES = "hybrid,backup,k_async,k_batch_async,ssp,async,local_sgd"
TOP = 20
WIDE = 10_000  # characters of a line
MOST = 1e300  # of a target
FAR_OFF = 0.15  # error of a run's own speed, from which on the plan says so

Given = Mapping[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0, or 2 after one line on standard error."""
    return command(run, __doc__, arguments)


def run(arguments: Sequence[str]) -> None:
    """Rank, print, and write the files."""
    given, plan = parse(arguments)
    width = None if sys.stdout.isatty() else WIDE  # nothing folds what is piped
    console = Console(quiet=given.get("quiet", False), width=width)
    with console.status("") as status:
        rows, missing = plan.rows(status.update)
    told = [*told_of(plan, rows), *missing]
    shown = rows[: given.get("top", TOP)]
    console.print(table(shown))
    for mark, text in notes(shown).items():
        console.print(f" {mark}  {text}", highlight=False, markup=False)
    if len(rows) > len(shown):
        told.append(f"{len(rows) - len(shown):,} more rows: top=N, json=FILE or html=FILE")
    for line in told:
        console.print(line, highlight=False, markup=False)
    if "json" in given:
        content = {"rows": list(map(asdict, rows)), "missing": missing, "notes": told}
        write(Path(given["json"]), as_json(content), "json")
    if "html" in given:
        write(Path(given["html"]), page_of(rows, told, arguments), "html")


# ---- options ------------------------------------------------------------------------------------


def parse(arguments: Sequence[str]) -> tuple[Given, Plan]:
    """The options, and the plan.

    Raises:
        UserError: naming the option, its valid values, and the closest one; or what a run lacks.
    """
    said = options(arguments, list(OPTIONS))
    given = {name: read_value(name, text, OPTIONS[name]) for name, text in said.items()}
    if "run" not in given:
        raise UserError("no run was given; say run=DIR, the directory of a run")
    texts = given["hosts"].split(",") if "hosts" in given else None
    layouts = None if texts is None else [layout(text, given) for text in texts]
    strategies = list(map(simulated.strategy_spec, split_values(given.get("strategy", STRATEGIES))))
    target = target_of(given["target"]) if "target" in given else None
    runs = [evidence(Path(folder)) for folder in given["run"].split(",")]
    check_alike(runs)
    if target is not None:
        target = directed(runs, target)
    if layouts is None:
        layouts = [layout(f"1x{runs[0].seen.n_workers}", given)]
    return given, Plan(runs, strategies, layouts, target, usable_cores())


def target_of(text: str) -> MetricTarget:
    """``val/wer:0.1``, ``val/wer:0.1:min``."""
    found = re.fullmatch(r"(.*?)(?::(min|max))?", text, re.DOTALL)
    assert found is not None, "it fits all texts"
    metric, separator, value = found[1].rpartition(":")
    number = value_of(value)
    if not metric or not separator or not (is_number(number) and abs(number) < MOST):
        raise UserError(
            f"target={text} was given; say target=METRIC:X, a logged metric and the value that is "
            "to be reached, a finite number: target=val/wer:0.1 (or val/wer:0.1:min, :max)"
        )
    return MetricTarget(metric, float(number), found[2])


def layout(text: str, given: Given) -> HostLayout:
    """``2x4:slower=3:network.bandwidth=1e9``; what it leaves out is as ``given``.

    Raises:
        UserError: naming what is wrong.
    """
    size, *rest = text.split(":")
    hosts, each = simulated.size(size)
    said = options(rest, list(OF_HOSTS), families=("slower",))
    own: dict[str, Any] = {name: given[name] for name in (*NETWORK, "cores") if name in given}
    slower: dict[int, float] = {}
    for name, value in said.items():
        family, _, member = name.partition(".")
        number = read_value(name, value, OF_HOSTS["slower" if family == "slower" else name])
        if family != "slower":
            own[name] = number
            continue
        worker = read_value("slower.W", member, Natural) if member else hosts * each - 1
        if worker >= hosts * each:
            raise UserError(
                f"hosts={text}: worker {worker} was named, but {hosts * each} workers have the "
                f"numbers 0 to {hosts * each - 1}"
            )
        if worker in slower:
            raise UserError(f"hosts={text}: slower.{worker} was given twice; say it once")
        slower[worker] = number
    bandwidth = own.get("network.bandwidth", math.inf)
    server = own.get("network.server_bandwidth", bandwidth)
    network = Network(own.get("network.latency_s", 0.0), bandwidth, server)
    return HostLayout(text, hosts, each, network, slower, own.get("cores", 0))


# ---- what is shown ------------------------------------------------------------------------------


def told_of(plan: Plan, rows: Sequence[PlanRow]) -> list[str]:
    """How well the runs' own speeds are known, and what is known of the target."""
    found = []
    for folder, (simulated_s, measured_s) in plan.checked.items():
        off = simulated_s / measured_s - 1
        far = "; something else costs much time, so rows are that uncertain"
        found.append(
            f"{folder}: {charts.number(measured_s)} samples/s "
            "measured without first mini-batches and validations, "
            f"{charts.number(simulated_s)} from its mini-batches and updates alone "
            f"({100 * off:+.1f} %{far if abs(off) > FAR_OFF else ''})"
        )
    if any(row.time_to_target_s for row in rows):
        found.append(
            "seconds to target: of training; start-up, first mini-batches and validations come "
            "on top"
        )
    if plan.target is not None and all(each.reached(plan.target) is None for each in plan.runs):
        found.append(
            f"no run has reached {plan.target}; the nearest value was "
            f"{charts.number(best_of(plan.runs, plan.target) or math.nan)}, so the time to it "
            "cannot be told: train longer, or give a target nearer to it"
        )
    return found


def notes(rows: Sequence[PlanRow]) -> dict[str, str]:
    """A letter for each thing that was extrapolated."""
    texts = dict.fromkeys(text for row in rows for text in row.extrapolated)
    return {_letters(number): text for number, text in enumerate(texts)}


def _letters(number: int) -> str:
    letter = chr(ord("a") + number % 26)
    return letter if number < 26 else _letters(number // 26 - 1) + letter


def heads(rows: Sequence[PlanRow]) -> list[str]:
    """The columns; those of the target only where it is known of a row."""
    timed = any(row.time_to_target_s for row in rows)
    target = ["seconds to target"] if timed else []
    fixed = ["strategy", "hosts", "samples/s", *target, "waiting", "stale", "MB/s", "memory"]
    return [*fixed, "first bottleneck"]


def cells(row: PlanRow, columns: Sequence[str]) -> list[str]:
    """The row's cells in these columns."""
    found = {
        "strategy": row.strategy,
        "hosts": row.hosts,
        "samples/s": charts.number(row.samples_per_s),
        "seconds to target": f"{_range(row.time_to_target_s)}, {row.trust}"
        if row.trust
        else "not told",
        "waiting": f"{100 * row.waiting_share:.0f} %",
        "stale": charts.number(round(row.staleness, 2)),
        "MB/s": charts.number(round(row.handed_over_bytes_per_s / 1e6, 3)),
        "memory": f"{row.memory_bytes / 1e6:,.3g} MB",
        "first bottleneck": row.bottleneck,
    }
    return [found[column] for column in columns]


def _range(pair: tuple[float, float] | None) -> str:
    if pair is None:
        return "–"
    return " to ".join(f"{x:,.0f}" if x >= 10 else f"{x:.2g}" for x in pair)


def table(rows: Sequence[PlanRow]) -> Table:
    """A rich table of the rows, with the letters of what was extrapolated."""
    made = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    for head in heads(rows):
        words = head in ("strategy", "hosts", "first bottleneck")
        least = min(14, max(len(cells(row, [head])[0]) for row in rows)) if words else None
        justify: Any = "left" if words else "right"
        made.add_column(head, justify=justify, overflow="fold", min_width=least)
    made.add_column("not measured", overflow="fold")
    marks = {text: mark for mark, text in notes(rows).items()}
    for row in rows:
        found = " ".join(marks[text] for text in row.extrapolated)
        made.add_row(*cells(row, heads(rows)), found)
    return made


MOST_POINTS = 400  # of the chart: the best rows


def page_of(rows: Sequence[PlanRow], told: Sequence[str], arguments: Sequence[str]) -> str:
    """The HTML page.

    Raises:
        UserError: if there is no matplotlib.
    """
    columns = heads(rows)
    lines = [[*cells(row, columns), "; ".join(row.extrapolated) or "nothing"] for row in rows]
    parts: list[Part] = [
        page.paragraph(f"python -m hybridtrain plan {shlex.join(arguments)}"),
        *map(page.note, told),
        page.table([*columns, "extrapolated"], lines),
        page.figures(_charts(rows[:MOST_POINTS])),
        page.paragraph(_LEGEND),
    ]
    return page.page("Strategies planned", parts)


def _charts(rows: Sequence[PlanRow]) -> list[Part]:
    """Speed against staleness, and against the time to the target."""
    numbers = {name: n for n, name in enumerate(dict.fromkeys(row.strategy for row in rows))}
    key = page.legend((name, charts.style(n)) for name, n in numbers.items())

    def chart(caption: str, xlabel: str, points: Sequence[tuple[PlanRow, float]]) -> Part:
        each = [
            Series(row.strategy, [x], [row.samples_per_s], charts.style(numbers[row.strategy]))
            for row, x in points
        ]
        svg = charts.line_chart(each, xlabel, "samples per second", xlog=True, legend=False)
        return page.figure(svg, caption, key)

    stale = [(row, 1 + row.staleness) for row in rows]
    timed = [(row, math.prod(row.time_to_target_s) ** 0.5) for row in rows if row.time_to_target_s]
    found = [chart("Speed against staleness", "1 + mean staleness in updates", stale)]
    if timed:
        xlabel = "seconds to the target, middle of the range"
        found.append(chart("Speed against time to the target", xlabel, timed))
    return found


_LEGEND = (
    "Waiting: from the arrival of a contribution to its release, also while the server makes "
    "another worker's update, mean over the workers. Stale: "
    "updates between the reading of the parameters and the application of the gradient. MB/s: what "
    "all workers hand over; memory: parameters, optimizer state, rows and copies on the host with "
    "the server. First bottleneck: what costs most of the workers' time, if it costs 5 %. A range "
    "of times is from the least to the most, of training alone; measured, fitted, range: how far "
    "to trust it."
)
