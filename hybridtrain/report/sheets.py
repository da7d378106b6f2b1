"""Runs as CSV for spreadsheets: one row for each run, and the rows of all histories.

UTF-8 with a byte order mark, numbers with a decimal point, no text that a spreadsheet would take
for a formula.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hybridtrain.report.history import KNOWN
from hybridtrain.report.runs import ABSENT, Run, differences

MARK = "\ufeff"  # Excel needs it to recognise UTF-8


def runs_sheet(runs: Sequence[Run], names: Sequence[str]) -> str:
    """One row for each run: how it ended, figures, metrics, and settings that differ."""
    metrics = list(dict.fromkeys(name for run in runs for name in run.metrics))
    told = differences(runs)
    rows = [
        _row(run, name)
        | {metric: run.metrics.get(metric) for metric in metrics}
        | {key: each[i] for key, each in told.items()}
        for i, (run, name) in enumerate(zip(runs, names, strict=True))
    ]
    return _sheet(rows[0], rows)


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
    return _sheet(["run", *columns], rows)


def _sheet(columns: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    columns = list(columns)
    writer.writerow(_cell(c) for c in columns)
    writer.writerows([_cell(row.get(c)) for c in columns] for row in rows)
    return MARK + text.getvalue()


def _cell(value: Any) -> str:
    """The cell's text; an apostrophe precedes what a spreadsheet would take for a formula."""
    match value:
        case None:
            return ""
        case float():
            return f"{value:.7g}" if math.isfinite(value) else ""
    text = "" if value is ABSENT else str(value)
    formula = text[:1] in ("=", "+", "-", "@", "\t", "\r") and not isinstance(value, int)
    return f"'{text}" if formula else text
