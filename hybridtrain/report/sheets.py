"""Runs as CSV: one row for each run, and all their histories one below the other.

For spreadsheets: UTF-8 with a mark that says so, numbers with a decimal point in full precision,
nothing that a spreadsheet would take for a formula.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hybridtrain.report.history import KNOWN
from hybridtrain.report.runs import ABSENT, Run, differences, waiting_percent

FIGURES = ("updates", "samples", "samples_per_s", "effective_batch", "train_s", "wall_s")
MARK = "\ufeff"  # Excel takes UTF-8 for what it is only with it


def runs_sheet(runs: Sequence[Run], names: Sequence[str]) -> str:
    """One row for each run: how it ended, its figures, metrics, and what it was told."""
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
        **{name: run.figure(name) for name in FIGURES},
        "waiting_percent": waiting_percent(run),
        "staleness_mean": run.figure("staleness", "mean"),
        "staleness_max": run.figure("staleness", "max"),
        "dropped": sum(dropped) if (dropped := run.figures("dropped")) else None,
        "lead_max": max(run.figures("lead", "max"), default=None),
        "sent_bytes": run.figure("handed_over", "sent_bytes"),
        "saved_bytes": run.figure("handed_over", "saved_bytes"),
        "overrides": " ".join(run.overrides),
    }


def curves_sheet(runs: Sequence[Run], names: Sequence[str]) -> str:
    """All rows of all histories; columns that a run has not are empty in its rows."""
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
    """As a spreadsheet should read it; what it would take for a formula gets an apostrophe."""
    match value:
        case None:
            return ""
        case bool() | str() | int():
            text = str(value)
        case float():
            return f"{value:.7g}" if math.isfinite(value) else ""
        case _:
            text = "" if value is ABSENT else str(value)
    formula = text[:1] in ("=", "+", "-", "@", "\t", "\r") and not isinstance(value, int)
    return f"'{text}" if formula else text
