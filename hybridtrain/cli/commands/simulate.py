"""Simulate strategies in virtual time, with as many workers as you like.

    python -m hybridtrain simulate strategy=hybrid,async workers=8,64,1000 [name=value ...]
    python -m hybridtrain simulate strategy=hybrid,ssp:lead=2,async task=digits html=page.html

Runs the same policy and server code as a training, on a clock that jumps from event to event, and
prints updates and samples per (virtual) second, the share of the workers' own speed that is left,
how long they wait, and how stale their gradients are; with a task, how the loss falls. The same
seed gives the same figures.

Options (several values: separated by commas, where it says so):
  strategy=NAME,...   strategies, with their options behind colons: hybrid, synchronous,
                      pipe_sgd:warm_up=5, backup:k=3, backup:k=auto, k_async:k=3,
                      k_batch_sync:k=3, k_batch_async:k=3, softsync:n=2, ssp:lead=2, async,
                      switch:first=hybrid:then=async:at_update=100 (default hybrid,async);
                      my.Mine:k=3, or '{_target_: my.Mine, k: 3}' (a policy of one's own);
                      with task=...: local_sgd:every=32, diloco, easgd, async_diloco, downpour,
                      sandblaster
  workers=N,...       how many workers, those that join later included (default 8)
  hosts=HxN,...       instead: H hosts with N workers each, the first with the server (hosts=2x4)
  batch_size=N        samples in a mini-batch (default 32)
  epoch=N             samples after which all workers meet (default: they never do; of a task, its
                      own)
  mini_batches=N      length of the run, in mini-batches of all workers together (default 20000;
                      of a task, its epochs)
  seconds=T           or in virtual seconds; with both, what comes first
  seed=N              of the service times (default 0)

How fast workers are:
  compute=KIND        service time of a mini-batch: constant, exponential (default),
                      shifted_exponential, pareto, lognormal, measured
  compute.mean_s=X    its mean in seconds (default 1)
  compute.shift=X     shifted_exponential: share of the mean that is always needed (default 0.5)
  compute.alpha=X     pareto: exponent of the tail (default 2.5)
  compute.sigma=X     lognormal: standard deviation of the logarithm (default 0.5)
  from=RUN            measured: the directory of a run of python -m hybridtrain, whose record has
                      each worker's times; or a .json file {"0": [seconds, ...], "1": ...}, or a
                      .csv file with the columns worker and seconds. Taken in order, and again
                      from the start
  run=RUN             all of a recorded run without a task: its workers, times, batch_size, epoch,
                      update_s and mini_batches, each of which may be given differently
  slower.W=X          worker W takes X times as long (may be given for several workers)
  compute.seconds_per_step=X,...  instead: the mean of each worker's

What is between them and the server, and what happens to them:
  network.latency_s=X         of every message, one way (default 0)
  network.bandwidth=X         bytes per second of each worker's own link, with parameters=N; with
                              hosts=..., of each host's, which its workers share
  network.server_bandwidth=X  bytes per second of the server's link, which all share in turn (with
                              hosts=..., by default as network.bandwidth)
  parameters=N        numbers (4 bytes each) in a contribution, and in what a release brings
  script=FILE.yaml    or the YAML itself: [{worker: 3, dies_at: 10}, {worker: 3, joins_at: 25},
                      {worker: [6, 7], joins_at: 30}, {worker: 1, slower: 4, from: 5, until: 20}]
  interrupt=true      who computes what cannot count any more begins anew at once, as the
                      literature assumes of backup workers (default: notices when it pushes)
  foresight=true      nobody waits for the end of a window in which no one else will come, as the
                      literature on asynchronous DiLoCo assumes (default: all of it)
  data_shards=S data_visit=N  whoever draws takes N mini-batches from one of S shards of the data,
                      then goes to the one visited least (default: all draw from one queue)
  update_s=X          seconds that an update takes the server, which makes one after the other;
                      under pipe_sgd beside the next mini-batches (default 0)

What is trained (default: nothing, only time passes):
  task=NAME           digits, parabola, speech, own ...: as for python -m hybridtrain, and so are
                      model.*, data.*, optimizer.*, experiment= (whose own `simulate` holds
                      options that are not given here; NAME=null leaves one out); of trainer.*
                      max_epochs and the clipping count. One module in one process computes all
                      gradients
  correction=NAME     of late gradients: by_staleness, polynomial:exponent=0.5, dc_asgd,
                      dc_asgd_adaptive, gap_aware
  exchange=NAME       what workers hand over: gradient (default), movement:every=8,
                      accumulated:n_push=4:n_fetch=4 (with strategy=async: Downpour)
  update=NAME         how the masters move: adagrad:lr=0.3, adaptive_revision:lr=0.3, sgd:lr=0.7 ...
                      (default: what goes with the strategy)

What to write:
  json=FILE           the figures
  report=timeline     a picture: when each worker computes, waits or is dropped, and the updates; it
                      ends with the sixteenth contribution of the fastest worker
  svg=FILE            where to draw it (default timeline.svg)
  html=FILE           a page with all of it and drawings, for a browser, that needs nothing else
                      (needs matplotlib, extra `report`)
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from hybridtrain.cli.commands.simulate_options import parse
from hybridtrain.engine.server.timeline import Timeline
from hybridtrain.report import charts, page
from hybridtrain.report.charts import Series
from hybridtrain.report.page import Part, write
from hybridtrain.report.timeline import picture
from hybridtrain.util.arguments import command
from hybridtrain.virtual.simulations import SimulationRow, simulate


def run(arguments: Sequence[str]) -> None:
    """Simulate every strategy with every number of workers; print and write the figures."""
    plan, files = parse(arguments)
    console = Console()
    rows, timelines = list[SimulationRow](), dict[str, Timeline]()
    with console.status("") as status:
        for workers, hosts in zip(plan.workers, plan.hosts, strict=True):
            for spec in plan.strategies:
                status.update(f"{spec.label}, {workers} workers")
                timeline = Timeline(workers) if "svg" in files else None
                rows.append(simulate(plan, spec, workers, timeline, hosts))
                if timeline is not None:
                    several = "" if workers == 1 else "s"
                    timelines[f"{spec.label}, {workers:,} worker{several}"] = timeline
    console.print(table(rows))
    speeds = sorted(row.events_per_s for row in rows)
    console.print(f"{speeds[0]:,.0f} to {speeds[-1]:,.0f} mini-batches simulated per second")
    if "json" in files:
        text = json.dumps([asdict(row) for row in rows], indent=2)
        write(files["json"], text + "\n", "json")
    if "svg" in files:
        write(files["svg"], picture(timelines, "virtual {}"), "svg")
    if "html" in files:
        write(files["html"], page_of(rows, arguments), "html")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0, or 2 after one line on standard error."""
    return command(run, __doc__, arguments)


# ---- show simulations: as a table, and as a page ------------------------------------------------

Value = Callable[[SimulationRow], float]


def table(rows: Sequence[SimulationRow]) -> Table:
    """A rich table with a row for each run."""
    made = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    made.add_column("strategy", overflow="fold")
    for head in heads(rows)[1:]:
        made.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        made.add_row(*cells(row, heads(rows)))
    return made


_CELLS: dict[str, Callable[[SimulationRow], str]] = {
    "strategy": lambda row: row.strategy,
    "workers": lambda row: str(row.workers),
    "hosts": lambda row: f"{row.hosts}x{row.workers // row.hosts}",
    "updates/s": lambda row: charts.number(row.updates_per_s),
    "samples/s": lambda row: charts.number(row.samples_per_s),
    "of ideal": lambda row: f"{100 * row.efficiency:.1f} %",
    "waiting": lambda row: f"{100 * row.waiting_share:.1f} %",
    "network": lambda row: f"{100 * row.network_share:.1f} %",
    "link": lambda row: f"{100 * row.link_share:.0f} %",
    "update": lambda row: f"{100 * row.update_share:.0f} %",
    "dropped": lambda row: str(row.dropped),
    "stale": lambda row: charts.number(row.staleness_mean),
    "99 %": lambda row: str(row.staleness_p99),
    "handed over": lambda row: f"{row.sent_bytes / 1e6:,.3g} MB",
    "loss": lambda row: charts.number(row.loss[-1][1]) if row.loss else "-",
}


def heads(rows: Sequence[SimulationRow]) -> list[str]:
    """The columns in which the runs differ from zero or each other; the first is the strategy."""
    several = any(row.hosts > 1 for row in rows)
    idle = {
        "workers": several or len({row.workers for row in rows}) == 1,
        **dict.fromkeys(("hosts", "link", "update"), not several),
        "99 %": several,  # there is no room for all
        "network": several or not any(row.network_share for row in rows),
        "dropped": not any(row.dropped for row in rows),
        "handed over": not any(row.sent_bytes for row in rows),
        "loss": not any(row.loss for row in rows),
    }
    return [head for head in _CELLS if not idle.get(head)]


def cells(row: SimulationRow, columns: Sequence[str]) -> list[str]:
    """The run's cells in these columns."""
    return [_CELLS[column](row) for column in columns]


# ---- curves -------------------------------------------------------------------------------------

PANELS: list[tuple[str, Value]] = [
    ("updates per virtual second", lambda row: row.updates_per_s),
    ("samples per virtual second", lambda row: row.samples_per_s),
    ("share of the ideal speed", lambda row: row.efficiency),
    ("share of time spent waiting", lambda row: row.waiting_share),
    ("mean staleness in updates", lambda row: row.staleness_mean),
]


def against_workers(rows: Sequence[SimulationRow], value: Value) -> list[Series]:
    """A line for each strategy: ``value`` against the number of workers."""
    lines = []
    for strategy in dict.fromkeys(row.strategy for row in rows):
        own = sorted((r for r in rows if r.strategy == strategy), key=lambda r: r.workers)
        lines.append(Series(strategy, [r.workers for r in own], [value(r) for r in own]))
    return lines


def names(rows: Sequence[SimulationRow]) -> list[str]:
    """A label for each run."""
    several = len({row.workers for row in rows}) > 1
    return [f"{row.strategy}, {row.workers}" if several else row.strategy for row in rows]


def lines(
    rows: Sequence[SimulationRow], points: Callable[[SimulationRow], list[tuple[float, float]]]
) -> list[Series]:
    """A line for each run that has such points."""
    found = ((name, points(row)) for name, row in zip(names(rows), rows, strict=True))
    return [
        Series(name, [x for x, _ in each], [y for _, y in each]) for name, each in found if each
    ]


def megabytes(row: SimulationRow) -> list[tuple[float, float]]:
    """Megabytes handed over by all workers, and the loss then."""
    return [(sent / 1e6, loss) for sent, loss in row.loss_over_bytes if sent]


# ---- the page -----------------------------------------------------------------------------------


def page_of(rows: Sequence[SimulationRow], arguments: Sequence[str]) -> str:
    """The HTML page with table, curves and charts.

    Raises:
        UserError: if there is no matplotlib.
    """
    columns = heads(rows)
    parts: list[Part] = [
        page.paragraph(f"python -m hybridtrain simulate {shlex.join(arguments)}"),
        page.table(columns, [cells(row, columns) for row in rows]),
    ]
    if curves := lines(rows, lambda row: row.loss):
        svg = charts.line_chart(curves, "virtual seconds", "loss", fit_y=True)
        parts += [page.heading("Loss"), page.figure(svg, "Loss against virtual time")]
    if curves := lines(rows, megabytes):
        axis = "megabytes handed over by all workers"
        svg = charts.line_chart(curves, axis, "loss", xlog=True, fit_y=True)
        parts.append(page.figure(svg, "Loss against what workers have handed over"))
    parts += [page.heading("Speed, waiting and staleness"), page.figures(_charts(rows))]
    parts.append(page.paragraph(_LEGEND))
    return page.page("Strategies in virtual time", parts)


def _charts(rows: Sequence[SimulationRow]) -> list[Part]:
    parts = [page.figure(_chart(rows, label, value), label) for label, value in PANELS]
    svg = charts.staleness_chart(names(rows), [row.staleness or {0: 1} for row in rows])
    return [*parts, page.figure(svg, "Staleness distribution")]


def _chart(rows: Sequence[SimulationRow], label: str, value: Value) -> str:
    """Lines against the number of workers; bars where all runs have the same."""
    if len({row.workers for row in rows}) > 1:
        lines = against_workers(rows, value)
        return charts.line_chart(lines, "workers", label, xlog=True, marks=True)
    return charts.length_chart(names(rows), [value(row) for row in rows], label)


_LEGEND = (
    "Seconds are virtual. The ideal speed is the sum of the workers' own, as if nobody ever waited "
    "and all were there all the time. Waiting: from the arrival of a contribution to its release; "
    "the way over the network is counted apart. Age: updates between the reading of the parameters "
    "and the application of the gradient computed from them."
)
