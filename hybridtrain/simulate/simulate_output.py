"""Show simulations: as a table, and as a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from hybridtrain.report import charts, page
from hybridtrain.report.charts import Series
from hybridtrain.report.page import Part
from hybridtrain.simulate.simulations import SimulationRow

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
    "updates/s": lambda row: _short(row.updates_per_s),
    "samples/s": lambda row: _short(row.samples_per_s),
    "of ideal": lambda row: f"{100 * row.efficiency:.1f} %",
    "waiting": lambda row: f"{100 * row.waiting_share:.1f} %",
    "network": lambda row: f"{100 * row.network_share:.1f} %",
    "dropped": lambda row: str(row.dropped),
    "stale": lambda row: _short(row.staleness_mean),
    "99 %": lambda row: str(row.staleness_p99),
    "handed over": lambda row: f"{row.sent_bytes / 1e6:,.3g} MB",
    "loss": lambda row: _short(row.loss[-1][1]) if row.loss else "-",
}


def heads(rows: Sequence[SimulationRow]) -> list[str]:
    """The columns in which the runs differ from zero or each other; the first is the strategy."""
    idle = {
        "workers": len({row.workers for row in rows}) == 1,
        "network": not any(row.network_share for row in rows),
        "dropped": not any(row.dropped for row in rows),
        "handed over": not any(row.sent_bytes for row in rows),
        "loss": not any(row.loss for row in rows),
    }
    return [head for head in _CELLS if not idle.get(head)]


def cells(row: SimulationRow, columns: Sequence[str]) -> list[str]:
    """The run's cells in these columns."""
    return [_CELLS[column](row) for column in columns]


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


# ---- curves -------------------------------------------------------------------------------------

PANELS: list[tuple[str, Value]] = [
    ("share of the ideal speed", lambda row: row.efficiency),
    ("share of time spent waiting", lambda row: row.waiting_share),
    ("mean staleness in updates", lambda row: row.staleness_mean),
]
HANDED_OVER = "megabytes handed over by all workers"


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


def losses(rows: Sequence[SimulationRow]) -> list[Series]:
    """A line for each run with a loss: loss against virtual time."""
    return [
        Series(name, [at for at, _ in row.loss], [loss for _, loss in row.loss])
        for name, row in zip(names(rows), rows, strict=True)
        if row.loss
    ]


def losses_over_bytes(rows: Sequence[SimulationRow]) -> list[Series]:
    """A line for each run with a loss: loss against the megabytes handed over by all workers."""
    found = []
    for name, row in zip(names(rows), rows, strict=True):
        points = [(sent / 1e6, loss) for sent, loss in row.loss_over_bytes if sent]
        if points:
            found.append(Series(name, [sent for sent, _ in points], [loss for _, loss in points]))
    return found


def ages(rows: Sequence[SimulationRow], most: int = 60) -> list[Series]:
    """Histogram of staleness per run, in at most ``most`` bins, up to the 99th percentile."""
    end = max(max(row.staleness_p99, 1) for row in rows)
    width = max(1, -(-(end + 1) // most))
    made = []
    for name, row in zip(names(rows), rows, strict=True):
        steps = [0.0] * (end // width + 1)
        total = sum(row.staleness.values()) or 1
        for age, n in row.staleness.items():
            if age <= end:
                steps[age // width] += n / (total * width)
        made.append(Series(name, [(i + 0.5) * width - 0.5 for i in range(len(steps))], steps))
    return made


# ---- the page -----------------------------------------------------------------------------------


def page_of(rows: Sequence[SimulationRow], arguments: Sequence[str]) -> str:
    """The HTML page with table, curves and charts.

    Raises:
        UserError: if there is no matplotlib.
    """
    columns = heads(rows)
    parts: list[Part] = [
        page.paragraph("python -m hybridtrain.simulate " + " ".join(arguments)),
        page.table(columns, [cells(row, columns) for row in rows]),
    ]
    if curves := losses(rows):
        svg = charts.line_chart(curves, "virtual seconds", "loss", fit_y=True)
        parts += [page.heading("Loss"), page.figure(svg, "Loss against virtual time")]
    if curves := losses_over_bytes(rows):
        svg = charts.line_chart(curves, HANDED_OVER, "loss", xlog=True, fit_y=True)
        parts.append(page.figure(svg, "Loss against what workers have handed over"))
    parts += [page.heading("Speed, waiting and staleness"), page.figures(_charts(rows))]
    parts.append(page.paragraph(_LEGEND))
    return page.page("Strategies in virtual time", parts)


def _charts(rows: Sequence[SimulationRow]) -> list[Part]:
    made: list[tuple[str, Value]] = [
        ("updates per virtual second", lambda row: row.updates_per_s),
        ("samples per virtual second", lambda row: row.samples_per_s),
        *PANELS,
    ]
    parts = [page.figure(_chart(rows, label, value), label) for label, value in made]
    svg = charts.bar_chart(ages(rows), "age in updates", "share of the contributions")
    return [*parts, page.figure(svg, "Staleness distribution, up to the 99th percentile")]


def _chart(rows: Sequence[SimulationRow], label: str, value: Value) -> str:
    """Lines against the number of workers; bars where all runs have the same."""
    if len({row.workers for row in rows}) > 1:
        lines = against_workers(rows, value)
        return charts.line_chart(lines, "workers", label, xlog=True, marks=True)
    return charts.length_chart(charts.Bars(names(rows), [value(row) for row in rows]), label)


_LEGEND = (
    "Seconds are virtual. The ideal speed is the sum of the workers' own, as if nobody ever waited "
    "and all were there all the time. Waiting: from the arrival of a contribution to its release; "
    "the way over the network is counted apart. Age: updates between the reading of the parameters "
    "and the application of the gradient computed from them."
)
