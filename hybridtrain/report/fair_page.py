"""Write a fair comparison: its table (JSON, Markdown, a sheet) and its section of the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from hybridtrain.report.charts import COLOURS, REST, Series, can_draw, line_chart, number, style
from hybridtrain.report.fair import Goal, Spread, interval, numbers_of
from hybridtrain.report.history import read_history
from hybridtrain.report.page import Part, figure, figures, heading, legend, paragraph, write
from hybridtrain.report.page import table as as_html
from hybridtrain.report.runs import as_json, brief, sheet

FAIR_FILE, TABLE, SHEET = "fair_comparison.json", "fair_comparison.md", "fair_comparison.csv"
OF_COMPARISON = ("task.metric", "test", "target.value")  # options that it gives its jobs
_POINTS = 60  # of a band
_ACROSS = {"train_s": "training time in s", "samples": "samples trained on, all workers"}


# ---- the table ----------------------------------------------------------------------------------


def columns_of(content: Mapping[str, Any]) -> dict[str, list[str]]:
    """The columns of the table by their heads, as text."""
    rows = content["strategies"]
    single = {row["seeds"] for row in rows} <= {0, 1}
    columns = {
        "strategy": [row["strategy"] for row in rows],
        "found": [found(row["values"]) for row in rows],
        "reached": [f"{row['reached']} of {row['seeds']}" for row in rows],
        "time, s": [_told(row["train_s"], single) for row in rows],
        "× fastest": [_times(row, "train_s", single) for row in rows],
        "samples": [_told(row["samples"], single) for row in rows],
        "× fewest": [_times(row, "samples", single) for row in rows],
        f"best {content['metric']}": [_told(row["best"], single, "–") for row in rows],
    }
    if any(row["tested"]["median"] is not None for row in rows):
        tested = [_told(row["tested"], single, "–") for row in rows]
        columns[str(content["tested"])] = tested
    return columns


def found(values: Mapping[str, str] | None) -> str:
    """The values that a search has found, in short."""
    each = [brief(f"{key.rpartition('.')[2]}={x}") for key, x in (values or {}).items()]
    return " ".join(each) or "–"


def _told(each: Spread, single: bool, none: str = "not reached") -> str:
    told = [none if x is None else number(x) for x in each.values()]
    if single or told[0] in ("not reached", "–"):
        return told[0]
    return f"{told[0]} [{told[1]}, {told[2]}]"


def _times(row: Mapping[str, Any], what: str, single: bool) -> str:
    if row[f"{what}_times"] is None:
        return "1" if row[what]["median"] is not None else "–"
    noise = " (noise)" if row[f"{what}_differ"] is False else ""
    return _told(row[f"{what}_times"], single, "∞") + noise


def table(content: Mapping[str, Any]) -> str:
    """The table in Markdown, its columns aligned."""
    columns = columns_of(content)
    widths = [max(map(len, (head, *each))) for head, each in columns.items()]
    lines = [list(columns), ["-" * w for w in widths], *zip(*columns.values(), strict=True)]
    return "\n".join(
        f"| {' | '.join(x.ljust(w) for x, w in zip(line, widths, strict=True))} |" for line in lines
    )


def leave(directory: Path, content: dict[str, Any]) -> None:
    """Write the comparison as JSON, as a table in Markdown, and as a sheet.

    Raises:
        UserError: if the directory cannot be written.
    """
    write(directory / FAIR_FILE, as_json(content), "hydra.sweep.dir")
    text = "\n".join([table(content), "", *(f"- {x}" for x in content["said"])])
    write(directory / TABLE, text + "\n", "hydra.sweep.dir")
    rows = [_flat(row) for row in content["strategies"]]
    heads = dict.fromkeys(key for row in rows for key in row)
    write(directory / SHEET, sheet(heads, rows), "hydra.sweep.dir")


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the sheet: a column for each end of an interval."""
    flat = {k: x for k, x in row.items() if not isinstance(x, dict) and not k.endswith("_times")}
    flat["values"] = " ".join(f"{key}={x}" for key, x in (row["values"] or {}).items())
    spreads = {key: x for key, x in row.items() if isinstance(x, dict) and "median" in x}
    return flat | {f"{key}_{end}": x for key, each in spreads.items() for end, x in each.items()}


# ---- the page -----------------------------------------------------------------------------------


def fair_section(content: Mapping[str, Any], folder: Path) -> Iterator[Part]:
    """The section about the comparison in this folder."""
    goal = Goal(content["metric"], content["mode"], content["target"])
    yield heading(f"Fair comparison: {goal}")
    yield paragraph(content["protocol"])
    columns = columns_of(content)
    yield as_html(list(columns), list(zip(*columns.values(), strict=True)))
    for line in content["said"]:
        yield paragraph(line)
    if not can_draw():
        return
    drawn = [_curves(content, folder, column) for column in _ACROSS]
    yield figures([*filter(None, drawn), *_tried(content)])


def _curves(content: Mapping[str, Any], folder: Path, column: str) -> Part | None:
    """The metric of each strategy: the median over its seeds, and the interval as a band."""
    lines = []
    for place, row in enumerate(content["strategies"][: len(COLOURS)]):
        name, metric = row["strategy"], content["metric"]
        mine = [x["folder"] for x in content["runs"] if x["strategy"] == name]
        curves = [read_history(folder / x).points(column, metric) for x in mine]
        curves = [x for x in curves if x[0]]
        if curves:
            lines.append(_band(name, curves, place))
    if not lines:
        return None
    ends = [min(line.x[0] for line in lines), max(line.x[-1] for line in lines)]
    lines.append(Series("target", ends, [content["target"]] * 2, REST))
    chart = line_chart(lines, _ACROSS[column], content["metric"], legend=False, fit_y=True)
    key = legend((x.label, x.style or style(0)) for x in lines)
    return figure(chart, f"{content['metric']}: median and interval over the seeds", key)


def _band(name: str, curves: Sequence[tuple[list[float], list[float]]], place: int) -> Series:
    """A run that has ended keeps its last value: it has reached the target, or its budget."""
    grid = np.linspace(max(x[0] for x, _ in curves), max(x[-1] for x, _ in curves), _POINTS)
    values = np.array([np.interp(grid, x, y) for x, y in curves])
    band = None
    if len(curves) > 1 and find_spec("scipy"):
        low, high = interval(values)
        band = low.tolist(), high.tolist()
    return Series(name, grid.tolist(), np.median(values, 0).tolist(), style(place), band)


def _tried(content: Mapping[str, Any]) -> Iterator[Part]:
    """The best value of each job of the searches, where each searched one number."""
    lines = []
    for place, row in enumerate(content["strategies"][: len(COLOURS)]):
        jobs = [x for x in content["search"] if x["strategy"] == row["strategy"]]
        values, best = [x for y in jobs for x in y["values"].values()], [y["best"] for y in jobs]
        found = zip(numbers_of(values), best, strict=False)  # one key each, or no chart
        if points := sorted(x for x in found if x[1] is not None):
            x, y = map(list, zip(*points, strict=True))
            lines.append(Series(row["strategy"], x, y, style(place)))
    keys = {key for x in content["search"] for key in x["values"]}
    if lines and len(keys) == 1:
        positive = all(x > 0 for line in lines for x in line.x)
        options: dict[str, Any] = {"xlog": positive, "marks": True, "legend": False, "fit_y": True}
        chart = line_chart(lines, keys.pop(), f"best {content['metric']}", **options)
        key = legend((x.label, x.style or style(0)) for x in lines)
        yield figure(chart, "What the searches have tried", key)
