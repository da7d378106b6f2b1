"""One page that compares several runs: results, settings and curves, for a browser."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from hybridtrain.report.charts import (
    COLOURS,
    Series,
    Style,
    can_draw,
    length_chart,
    line_chart,
    staleness_chart,
    style,
)
from hybridtrain.report.fair_page import FAIR_FILE, OF_COMPARISON, fair_section
from hybridtrain.report.history import HISTORY_FILE, KNOWN
from hybridtrain.report.page import (
    Part,
    code,
    details,
    figure,
    figures,
    heading,
    legend,
    link,
    note,
    page,
    paragraph,
    setting,
    table,
    write,
)
from hybridtrain.report.runs import (
    CONFIG_FILE,
    SUMMARY_FILE,
    Run,
    brief,
    common_overrides,
    differences,
    distinct,
    find_runs,
    labels,
    read_mapping,
    read_run,
    rounded,
    sheet,
)
from hybridtrain.report.search import SEARCH_FILE, search_section
from hybridtrain.util.option_types import is_number

PAGE, RUNS, CURVES = "comparison.html", "comparison.csv", "curves.csv"
FEW = 6  # rows of a table that is not folded away


def compare(folders: Sequence[Path], out: Path) -> list[Run]:
    """Write page and sheets about all runs below ``folders`` into the folder ``out``.

    Raises:
        UserError: if there are no runs, or ``out`` cannot be written.
    """
    runs = [read_run(folder) for folder in find_runs(folders)]
    fair = any((folder / FAIR_FILE).is_file() for folder in folders)
    names = labels(runs, OF_COMPARISON if fair else ())
    write(out / RUNS, runs_sheet(runs, names), "out")
    write(out / CURVES, curves_sheet(runs, names), "out")
    write(out / PAGE, comparison(runs, names, folders, out), "out")
    return runs


def comparison(
    runs: Sequence[Run], names: Sequence[str], folders: Sequence[Path], out: Path
) -> str:
    """The page's text; its links are relative to the folder ``out``."""
    shown = looks_of(runs, names)
    tasks = list(dict.fromkeys(run.task for run in runs))
    title = f"{_count(len(runs), 'run')} compared"
    title = f"{', '.join(filter(None, tasks))}: {title}" if any(tasks) else title
    begun = sorted(str(x) for run in runs if (x := run.summary.get("started")))
    when = f"begun {begun[0][:16]}" if begun else f"seen {date.today()}"
    parts = [*_head(runs, folders), *_remarks(shown)]
    parts += [part for folder in folders for part in sections_of(folder)]
    parts += [heading("Results"), results(shown, out), _sheets_hint(out), *hosts_of(shown)]
    for task in tasks:
        title_of = (f"Task {task}" if task else "No task known") if len(tasks) > 1 else ""
        parts += curves_of(title_of, [x for x in shown if x.run.task == task])
    parts += settings(shown)
    return page(title, parts, f"{when}; {', '.join(map(str, folders))}")


def sections_of(folder: Path) -> Iterator[Part]:
    """The sections about a fair comparison and a search, where the folder has their files."""
    for name, section in ((FAIR_FILE, fair_section), (SEARCH_FILE, search_section)):
        content = read_mapping(folder / name, [])
        try:
            yield from section(content, folder) if content else ()
        except (LookupError, TypeError, AttributeError, ValueError):
            yield note(f"{name} could not be read.")


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _head(runs: Sequence[Run], folders: Sequence[Path]) -> Iterator[Part]:
    common = common_overrides(runs)
    if common:
        yield paragraph("In all runs: ", code(" ".join(x.lstrip("+") for x in common)))
    devices = list(dict.fromkeys(str(x) for run in runs if (x := run.summary.get("device"))))
    if devices:
        yield paragraph(f"Device: {', '.join(devices)}.")
    if not can_draw():
        again = f"python -m hybridtrain compare {shlex.join(map(str, folders))}"
        yield note(
            "There are no curves here, because matplotlib is not installed. Install it (",
            *(code("pip install matplotlib"), ") and make the page again: ", code(again)),
            f". The points themselves are in {CURVES}.",
        )


def _remarks(shown: Sequence[Shown]) -> Iterator[Part]:
    """Runs that did not finish, and files that could not be read."""
    bad = [x for x in shown if not x.run.ended_well]
    if bad:
        yield note(f"{len(bad)} of {_count(len(shown), 'run')} did not finish.")
        rows = [[x.name, x.run.status, x.run.reason] for x in bad]
        made = table(["run", "end", "why"], rows, range(len(rows)))
        yield made if len(bad) <= FEW else details("Which, and why", [made])
    for x in shown:
        if x.run.broken:
            yield note(f"{x.name}: could not be read: {', '.join(x.run.broken)}.")


def _sheets_hint(out: Path) -> Part:
    return paragraph(
        "Samples/s are of training time; in wall time are start-up, validations and the test. ",
        *("The same as sheets: ", link(out / RUNS, RUNS, out), ", "),
        *(link(out / CURVES, CURVES, out), " (the points of all curves)."),
    )


# ---- looks of the runs --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shown:
    """A run with its name and style on the page."""

    run: Run
    name: str
    style: Style
    group: str  # its entry in the legends


def looks_of(runs: Sequence[Run], names: Sequence[str]) -> list[Shown]:
    """A style for each run; where they are too many, one for each value of an override."""
    looks, groups = [style(i) for i in range(len(runs))], list(names)
    if len(runs) > len(COLOURS):
        if (key := _grouping(runs)) is not None:
            values = [_value(run, key) for run in runs]
            number = {value: i for i, value in enumerate(dict.fromkeys(values))}
            looks = [style(number[v]) for v in values]
            groups = [brief(f"{key}={v}") for v in values]
        else:
            groups = groups[: len(COLOURS)] + ["the others"] * (len(runs) - len(COLOURS))
    return [Shown(*x) for x in zip(runs, names, looks, groups, strict=True)]


def _value(run: Run, key: str) -> str:
    found = [x.partition("=")[2] for x in run.overrides if x.partition("=")[0] == key]
    return found[-1] if found else "–"


def _grouping(runs: Sequence[Run]) -> str | None:
    """Key of the first override with at least two values, and few enough to draw."""
    keys = dict.fromkeys(x.partition("=")[0] for run in runs for x in run.overrides)
    few = (k for k in keys if 2 <= len({_value(run, k) for run in runs}) <= len(COLOURS))
    return next(few, None)


def _legend_of(shown: Sequence[Shown]) -> Part:
    return legend(dict.fromkeys((x.group, x.style) for x in shown))


# ---- tables -------------------------------------------------------------------------------------


HEADS = {  # of the results -> name of the number
    "samples/s": "samples_per_s",
    "training s": "train_s",
    "wall s": "wall_s",
    "updates": "updates",
    "samples": "samples",
    "samples/update": "effective_batch",
    "waiting %": "waiting_percent",
    "staleness, mean": "staleness_mean",
    "staleness, max": "staleness_max",
    "dropped": "dropped",
    "lead, max": "lead_max",
    "handed over, bytes": "sent_bytes",
}


HOST_HEADS = {
    "workers": "workers",
    "waiting, share of time": "waiting_share",
    "sent, bytes": "sent",
    "sending, s": "sending_s",
    "received, bytes": "received",
    "receiving, s": "receiving_s",
}


def results(shown: Sequence[Shown], out: Path) -> Part:
    """A row for each run; empty columns are left out."""
    found = distinct(m for x in shown for m in x.run.metrics)
    metrics = [m for m in found if not m.startswith("lr-")]
    compared = {x.run.config.get("task.metric") for x in shown}
    metrics.sort(key=lambda name: (name not in compared, _stage(name)))
    all_well = all(x.run.ended_well for x in shown)
    numbers = [x.run.numbers for x in shown]
    columns: dict[str, list[Any]] = {
        "run": [link(x.run.folder, x.name, out) for x in shown],
        "task": [x.run.task for x in shown] if len({x.run.task for x in shown}) > 1 else [],
        "end": [] if all_well else [x.run.status for x in shown],
        **{_not_ours(m): [x.run.metrics.get(m) for x in shown] for m in metrics},
        **{head: [each[name] for each in numbers] for head, name in HEADS.items()},
        "saved, bytes": [each["saved_bytes"] or None for each in numbers],
        "workers": [x.run.figure("workers") for x in shown],
        "files": [_files(x.run, out) for x in shown],
    }
    kept = {k: v for k, v in columns.items() if any(x not in (None, "") for x in v)}
    bad = [number for number, x in enumerate(shown) if not x.run.ended_well]
    return table(list(kept), list(zip(*kept.values(), strict=True)), bad)


def _stage(metric: str) -> int:
    """Metrics of the test come first, then those of validations, and of training last."""
    stages = {"test": 0, "val": 1, "train": 3}
    return next((n for stage, n in stages.items() if metric.startswith(stage)), 2)


def _not_ours(metric: str) -> str:
    """As in the history, a metric with the name of a column of ours has a prefix."""
    return f"logged/{metric}" if metric in {*HEADS, "run", "task", "end", "workers"} else metric


def hosts_of(shown: Sequence[Shown]) -> Iterator[Part]:
    """A row for each host of the runs that had several."""
    rows = [
        [x.name, n, *(host.get(name) for name in HOST_HEADS.values())]
        for x in shown
        for n, host in enumerate(x.run.hosts)
    ]
    if rows:
        yield heading("Hosts")
        yield table(["run", "host", *HOST_HEADS], rows)


def _files(run: Run, out: Path) -> Part:
    files = [x for x in (SUMMARY_FILE, HISTORY_FILE, CONFIG_FILE) if (run.folder / x).is_file()]
    return Part(" ".join(link(run.folder / x, x.rpartition("/")[2], out) for x in files))


def settings(shown: Sequence[Shown]) -> Iterator[Part]:
    """The configuration values in which the runs differ."""
    if len(shown) < 2:
        return
    told = differences([x.run for x in shown])
    yield heading("What sets the runs apart")
    if not told:
        yield paragraph("Their configurations do not differ, as far as they are known.")
        return
    if len(shown) <= len(COLOURS):
        rows: list[list[Any]] = [[setting(k), *map(_told, each)] for k, each in told.items()]
        parts = [table(["setting", *(x.name for x in shown)], rows)]
    else:
        rows = [[x.name, *(_told(each[i]) for each in told.values())] for i, x in enumerate(shown)]
        parts = [table(["run", *told], rows)]
    summary = f"{len(told)} settings of the configuration"
    yield details(summary, parts) if len(shown) * len(told) > 200 else parts[0]


def _told(value: Any) -> str:
    """The value as typed on the command line, with fewer digits."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
    return rounded(str(value))


# ---- figures ------------------------------------------------------------------------------------

MOST_POINTS = 200  # of a line
MOST_BARS = 24
ACROSS = {  # column of the x axis -> caption, label
    "wall_s": ("wall time", "wall time in s, start-up and validations included"),
    "samples": ("samples", "samples trained on, all workers"),
    "updates": ("updates", "updates of the parameters"),
}


def curves_of(title: str, shown: Sequence[Shown]) -> Iterator[Part]:
    """Curves and bars, which can only be compared within one task."""
    something = any(x.run.curve.columns or x.run.summary for x in shown)
    if not can_draw() or not something:
        return
    yield heading(title or "Curves")
    curves = [x for name in _drawn_metrics(shown) for x in _curves(shown, name)]
    yield figures(curves) if curves else paragraph(f"No run has left a {HISTORY_FILE}.")
    yield heading("Speed, waiting, staleness", 3 if title else 2)
    bars = list(_bars(shown))
    if len(shown) > MOST_BARS:
        yield paragraph("There are too many runs for bars; the table has their figures.")
    elif bars:
        yield figures(bars)


def _drawn_metrics(shown: Sequence[Shown]) -> list[str]:
    """The training loss, and the metric that the task monitors, or else the first there is."""
    watched = [str(x.run.config.get("task.monitor")) for x in shown]
    found = dict.fromkeys(m for x in shown for m in x.run.curve.metrics)
    ours = [m for m in distinct(found) if not m.startswith(("train", "lr-"))]
    return ["train_loss", *([m for m in watched if m in found] or ours)[:1]]


def _curves(shown: Sequence[Shown], metric: str) -> Iterator[Part]:
    """The metric against wall time, samples and updates."""
    what = "loss in training" if metric == "train_loss" else metric
    for column, (caption, axis) in ACROSS.items():
        present = [x for x in shown if x.run.curve.points(column, metric)[0]]
        drawn = [
            Series(x.name, *_thinned(*x.run.curve.points(column, metric)), x.style) for x in present
        ]
        if drawn:
            svg = line_chart(
                *(drawn, axis, what),
                ylog=_spans_decades(drawn),
                marks=all(len(each.x) <= 30 for each in drawn) and len(drawn) <= len(COLOURS),
                legend=False,
                fit_y=True,
            )
            yield figure(svg, f"{what} against {caption}", _legend_of(present))


def _spans_decades(drawn: Sequence[Series]) -> bool:
    values = [y for each in drawn for y in each.y]
    return min(values) > 0 and max(values) / min(values) > 50


def _thinned(x: list[float], y: list[float]) -> tuple[list[float], list[float]]:
    """Every n-th point, and the last."""
    step = -(-len(x) // MOST_POINTS)
    kept = sorted({*range(0, len(x), step), len(x) - 1})
    return [x[i] for i in kept], [y[i] for i in kept]


def _bars(shown: Sequence[Shown]) -> Iterator[Part]:
    names, looks = [x.name for x in shown], [x.style for x in shown]
    panels = [
        ("Speed", "samples per s of training time", "samples_per_s"),
        ("Waiting", "% of the time, mean over the workers", "waiting_percent"),
        ("Samples per update", "samples", "effective_batch"),
    ]
    for caption, axis, number in panels:
        lengths = [x.run.numbers[number] for x in shown]
        if any(x is not None for x in lengths):
            yield figure(length_chart(names, lengths, axis, looks), caption)
    if counted := [x for x in shown if _ages(x.run)]:
        names, looks = [x.name for x in counted], [x.style for x in counted]
        svg = staleness_chart(names, [_ages(x.run) for x in counted], looks, legend=False)
        yield figure(svg, "Staleness of what was applied", _legend_of(counted))


def _ages(run: Run) -> dict[int, float]:
    """Staleness -> contributions; empty: unknown."""
    staleness = run.summary.get("staleness")
    counts = staleness.get("histogram") if isinstance(staleness, dict) else None
    known = counts.items() if isinstance(counts, dict) else ()
    return {int(age): n for age, n in known if str(age).isdecimal() and is_number(n) and n > 0}


# ---- runs as CSV for spreadsheets: one row for each run, and the rows of all histories ----------


def runs_sheet(runs: Sequence[Run], names: Sequence[str]) -> str:
    """One row for each run: how it ended, figures, metrics, and settings that differ."""
    metrics = list(dict.fromkeys(name for run in runs for name in run.metrics))
    told = differences(runs)
    rows = [
        (own := _row(run, name))
        | {metric: run.metrics.get(metric) for metric in metrics}
        | {key: each[i] for key, each in told.items()}
        | own  # also where a metric has the name of a column
        for i, (run, name) in enumerate(zip(runs, names, strict=True))
    ]
    return sheet(rows[0], rows)


def _row(run: Run, name: str) -> dict[str, Any]:
    return {
        "run": name,
        "folder": run.folder.as_posix(),
        "task": run.task,
        "status": run.status,
        "reason": None if run.ended_well else run.reason,
        "started": run.summary.get("started"),
        "strategy": run.summary.get("strategy"),
        "workers": run.figure("workers"),
        "device": run.summary.get("device"),
        **run.numbers,
        "overrides": " ".join(run.overrides),
    }


def curves_sheet(runs: Sequence[Run], names: Sequence[str]) -> str:
    """The rows of all histories; columns that a run lacks are empty in its rows."""
    found = dict.fromkeys(c for run in runs for c in run.curve.columns)
    columns = [*(c for c in KNOWN if c in found), *(c for c in found if c not in KNOWN)]
    rows = [
        {"run": name, **{c: run.curve.columns[c][i] for c in columns if c in run.curve.columns}}
        for run, name in zip(runs, names, strict=True)
        for i in range(len(run.curve.columns.get("wall_s", [])))
    ]
    return sheet(["run", *columns], rows)
