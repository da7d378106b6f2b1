"""The tables of a comparison: how the runs went, and what they were told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hybridtrain.report.charts import COLOURS
from hybridtrain.report.history import HISTORY_FILE
from hybridtrain.report.looks import Shown
from hybridtrain.report.page import Part, TableRow, code, details, heading, link, paragraph, table
from hybridtrain.report.runs import CONFIG_FILE, SUMMARY_FILE, Run, differences, waiting_percent


def results(shown: Sequence[Shown], out: Path) -> Part:
    """A row for each run; columns that say nothing of any are left out."""
    metrics = list(dict.fromkeys(m for x in shown for m in x.run.metrics if not _is_lr(m)))
    compared = {x.run.config.get("task.metric") for x in shown}
    metrics.sort(key=lambda name: (name not in compared, not name.startswith("test")))
    all_well = all(x.run.ended_well for x in shown)
    columns: dict[str, list[Any]] = {
        "run": [link(x.run.folder, x.name, out) for x in shown],
        "task": [x.run.task for x in shown] if len({x.run.task for x in shown}) > 1 else [],
        "": [] if all_well else [x.run.status for x in shown],
        **{m: [x.run.metrics.get(m) for x in shown] for m in metrics},
        "samples/s": [x.run.figure("samples_per_s") for x in shown],
        "training s": [x.run.figure("train_s") for x in shown],
        "wall s": [x.run.figure("wall_s") for x in shown],
        "updates": [x.run.figure("updates") for x in shown],
        "samples": [x.run.figure("samples") for x in shown],
        "samples/update": [x.run.figure("effective_batch") for x in shown],
        "waiting %": [waiting_percent(x.run) for x in shown],
        "staleness, mean": [x.run.figure("staleness", "mean") for x in shown],
        "max": [x.run.figure("staleness", "max") for x in shown],
        "dropped": [_total(x.run.figures("dropped")) for x in shown],
        "lead, max": [max(x.run.figures("lead", "max"), default=None) for x in shown],
        "handed over, bytes": [x.run.figure("handed_over", "sent_bytes") for x in shown],
        "saved, bytes": [x.run.figure("handed_over", "saved_bytes") or None for x in shown],
        "workers": [x.run.figure("workers") for x in shown],
        "files": [_files(x.run, out) for x in shown],
    }
    kept = {k: v for k, v in columns.items() if any(x not in (None, "") for x in v)}
    cells = zip(*kept.values(), strict=True)
    return table(
        list(kept), [TableRow(c, not x.run.ended_well) for c, x in zip(cells, shown, strict=True)]
    )


def _is_lr(metric: str) -> bool:
    return metric.startswith("lr-")


def _total(numbers: Sequence[float]) -> float | None:
    return sum(numbers) if numbers else None


def _files(run: Run, out: Path) -> Part:
    files = [x for x in (SUMMARY_FILE, HISTORY_FILE, CONFIG_FILE) if (run.folder / x).is_file()]
    return Part(" ".join(link(run.folder / x, x.rpartition("/")[2], out) for x in files))


def settings(shown: Sequence[Shown]) -> Iterator[Part]:
    if len(shown) < 2:
        return
    told = differences([x.run for x in shown])
    yield heading("What sets the runs apart")
    if not told:
        yield paragraph("Their configurations do not differ, as far as they are known.")
        return
    if len(shown) <= len(COLOURS):
        rows: list[list[Any]] = [[code(k), *map(_told, each)] for k, each in told.items()]
        parts = [table(["setting", *(x.name for x in shown)], rows)]
    else:
        rows = [[x.name, *(_told(each[i]) for each in told.values())] for i, x in enumerate(shown)]
        parts = [table(["run", *told], rows)]
    summary = f"{len(told)} settings of the configuration"
    yield details(summary, parts) if len(shown) * len(told) > 200 else parts[0]


def _told(value: Any) -> str:
    """As it would be typed."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
    return str(value)
