"""One picture of a result: a bar for each ratio, and lines for what grows with the parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.frame import tell
from benchmarks.rows import Row, Skipped
from hybridtrain.report.charts import COLOURS, DASHES

_ROW_INCHES, _LINES_INCHES, _REST_INCHES = 0.27, 3.6, 1.2
_TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
_GRID = re.compile(r"(1e\d+) parameters, (\d+) workers?")


def draw(rows: Sequence[Row | Skipped], machine: str, file: Path) -> None:
    """Write a PNG; without matplotlib (extra ``report``) say so and write none."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        tell("no plot: it needs matplotlib (pip install 'hybridtrain[report]')")
        return
    scaling = [row for row in rows if isinstance(row, Row) and row.part == "scaling"]
    bars = [x for x in rows if isinstance(x, Row) and x.ratio is not None and x.part != "scaling"]
    heights = [_REST_INCHES + _ROW_INCHES * len(bars)] * bool(bars)
    heights += [_LINES_INCHES] * bool(scaling)
    if not heights:
        return
    figure = Figure(figsize=(12, sum(heights)), layout="constrained")
    axes = list(figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0])
    if bars:
        _ratios(axes.pop(0), bars)
    if scaling:
        _lines(axes.pop(0), scaling)
    figure.supxlabel(machine, fontsize=7)
    figure.savefig(file, dpi=110)


# ---- ratios -------------------------------------------------------------------------------------


def _ratios(axes: Any, rows: Sequence[Row]) -> None:
    parts = list(dict.fromkeys(row.part for row in rows))
    for y, row in enumerate(rows):
        ends = sorted(_speed(row, ratio) for ratio in row.ratios)
        middle, goal = _speed(row, row.ratio or 1.0), row.goal.least
        colour = COLOURS[parts.index(row.part) % len(COLOURS)]
        axes.barh(y, middle - 1, left=1, color=colour, height=0.7, alpha=0.85)
        axes.plot([ends[0], ends[-1]], [y, y], color="black", linewidth=1)
        marks = [1.0, ends[-1]]
        if goal is not None:
            marks.append(_speed(row, goal))
            axes.plot(marks[-1], y, "|", color="black", markersize=11, mew=2)
        text = f"{middle:.2f}×" if middle < 10 else f"{middle:.1f}×"
        bold = "bold" if goal is not None and row.goal.met(row.ratio or 0.0) is False else "normal"
        place = {"xytext": (5, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(text, (max(marks), y), fontsize=8, fontweight=bold, **place)
    axes.set_yticks(range(len(rows)), [_label(row) for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    ticks = [tick for tick in _TICKS if low <= tick <= high * 1.3]
    axes.set_xlim(low, high * 1.3)
    axes.set_xticks(ticks, [f"{tick:g}×" for tick in ticks])
    axes.minorticks_off()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.margins(y=0.01)
    _plain(axes)
    note = "bar: median of pairs; thin line: their spread; upright mark: the goal, bold if missed"
    axes.figure.suptitle(f"How many times faster than the baseline ({note})", fontsize=9)


def _speed(row: Row, ratio: float) -> float:
    """Convert a ratio of times to one of speeds, so that right is good everywhere."""
    return ratio if row.goal.of == "speed" else 1 / ratio


def _label(row: Row) -> str:
    work = row.work if len(row.work) < 50 else row.work.partition(" (")[0]
    return f"{work}: {row.method} against {row.baseline}"


# ---- scaling ------------------------------------------------------------------------------------


def _lines(axes: Any, rows: Sequence[Row]) -> None:
    """Time against parameters; a colour for each number of workers, gloo dashed."""
    points: dict[tuple[str, int], dict[float, float]] = {}
    for row in rows:
        if (found := _GRID.fullmatch(row.work)) is None:
            continue
        size, workers = float(found[1]), int(found[2])
        points.setdefault((row.method, workers), {})[size] = row.ours
        if row.theirs is not None:
            points.setdefault((row.baseline, workers), {})[size] = row.theirs
    own = rows[0].method
    for (method, workers), line in sorted(points.items(), key=lambda x: (x[0][0] != own, x[0][1])):
        look = {"color": COLOURS[int(math.log2(workers)) % len(COLOURS)]}
        dashes = DASHES[0 if method == own else 1]
        label = f"{method}, {workers} worker{'s' * (workers > 1)}"
        axes.plot(*zip(*sorted(line.items()), strict=True), "o-", ms=3, label=label, **look)
        axes.lines[-1].set_dashes(dashes) if dashes else None
    axes.set(xscale="log", yscale="log", xlabel="parameters", ylabel="ms an exchange and update")
    axes.legend(frameon=False, fontsize=7, loc="center right", bbox_to_anchor=(-0.15, 0.5))
    axes.set_title("scaling: what one exchange and update costs", fontsize=9)
    _plain(axes)


def _plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
