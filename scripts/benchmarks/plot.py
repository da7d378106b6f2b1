"""One picture of all ratios: a bar for each row, its spread, and what was asked of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.frame import tell
from benchmarks.rows import Row, Skipped
from hybridtrain.report.charts import COLOURS

_ROW_INCHES = 0.27


def draw(rows: Sequence[Row | Skipped], machine: str, file: Path) -> None:
    """Write a PNG; without matplotlib (extra ``report``) say so and write none."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        tell("no plot: it needs matplotlib (pip install 'hybridtrain[report]')")
        return
    shown = [row for row in rows if isinstance(row, Row) and row.ratio is not None]
    if not shown:
        return
    figure = Figure(figsize=(11, 1.6 + _ROW_INCHES * len(shown)), layout="constrained")
    axes = figure.subplots()
    parts = list(dict.fromkeys(row.part for row in shown))
    for y, row in enumerate(shown):
        low, middle, high = (_speed(row, f(row.ratios)) for f in (min, _median, max))
        colour = COLOURS[parts.index(row.part) % len(COLOURS)]
        axes.barh(y, middle - 1, left=1, color=colour, height=0.7)
        axes.plot([low, high], [y, y], color="black", linewidth=1)
        if row.goal.least is not None:
            axes.plot(_speed(row, row.goal.least), y, "|", color="black", markersize=11, mew=2)
        text = f"{middle:.2f}×" if middle < 10 else f"{middle:.1f}×"
        axes.annotate(
            text, (max(high, 1), y), (4, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.set_yticks(range(len(shown)), [_label(row) for row in shown], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    ticks = [0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50]
    axes.set_xticks(ticks, [f"{tick:g}×" for tick in ticks])
    axes.minorticks_off()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.margins(y=0.01)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.set_title(
        "How many times faster than the baseline (median; line: spread; black mark: the goal)",
        fontsize=10,
    )
    figure.supxlabel(machine, fontsize=7)
    figure.savefig(file, dpi=110)


def _speed(row: Row, ratio: float) -> float:
    """Of goals in time, too, the speed is drawn: up is good everywhere."""
    return ratio if row.goal.of == "speed" else 1 / ratio


def _median(ratios: Sequence[float]) -> float:
    ordered = sorted(ratios)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _label(row: Row) -> str:
    return f"{row.part}: {row.work}, against {row.baseline}"
