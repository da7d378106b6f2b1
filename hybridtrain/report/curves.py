"""The figures of a comparison: curves, bars, histograms; only what can be compared in one task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hybridtrain.report.charts import (
    COLOURS,
    Bars,
    Series,
    bar_chart,
    can_draw,
    length_chart,
    line_chart,
)
from hybridtrain.report.history import HISTORY_FILE
from hybridtrain.report.looks import Shown, legend_of
from hybridtrain.report.page import Part, figure, figures, heading, paragraph
from hybridtrain.report.runs import Run, waiting_percent

MOST_POINTS = 200  # of a line
MOST_BARS = 24
ACROSS = {  # what curves are drawn against: column, caption, axis
    "wall_s": ("wall time", "wall time in s, start-up and validations included"),
    "samples": ("samples", "samples trained on, all workers"),
    "updates": ("updates", "updates of the parameters"),
}


def curves_of(title: str, shown: Sequence[Shown]) -> Iterator[Part]:
    """Everything that can only be compared within one task."""
    something = any(x.run.course.columns or x.run.summary for x in shown)
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
    """The loss in training, and the metric that the task watches, or else the first there is."""
    watched = [str(x.run.config.get("task.monitor")) for x in shown]
    found = dict.fromkeys(m for x in shown for m in x.run.course.metrics)
    ours = [m for m in found if not m.startswith(("train", "lr-"))]
    return ["train_loss", *([m for m in watched if m in found] or ours)[:1]]


def _curves(shown: Sequence[Shown], metric: str) -> Iterator[Part]:
    """The metric against wall time, samples and updates."""
    what = "loss in training" if metric == "train_loss" else metric
    for column, (caption, axis) in ACROSS.items():
        drawn = [
            Series(x.name, *_thinned(*points), x.style)
            for x in shown
            if (points := x.run.course.points(column, metric))[0]
        ]
        if drawn:
            svg = line_chart(
                *(drawn, axis, what),
                ylog=_spans_decades(drawn),
                marks=all(len(each.x) <= 30 for each in drawn) and len(drawn) <= len(COLOURS),
                legend=False,
                fit_y=True,
            )
            present = [x for x in shown if x.run.course.points(column, metric)[0]]
            yield figure(svg, f"{what} against {caption}", legend_of(present))


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
    waiting = [waiting_percent(x.run) for x in shown]
    panels: list[tuple[str, str, list[float | None]]] = [
        ("Speed", "samples per s of training time", [x.run.figure("samples_per_s") for x in shown]),
        ("Waiting", "% of the time, mean over the workers", waiting),
        ("Samples per update", "samples", [x.run.figure("effective_batch") for x in shown]),
    ]
    for caption, axis, lengths in panels:
        if any(x is not None for x in lengths):
            yield figure(length_chart(Bars(names, lengths, looks), axis), caption)
    histograms = [(x, *ages) for x in shown if (ages := _ages(x.run))]
    if histograms:
        drawn = [Series(x.name, ages, shares, x.style) for x, ages, shares in histograms]
        svg = bar_chart(drawn, "staleness in updates", "% of contributions", legend=False)
        key = legend_of([x for x, *_ in histograms])
        yield figure(svg, "Staleness of what was applied", key)


def _ages(run: Run) -> tuple[list[float], list[float]] | None:
    """Each staleness from 0 on, and the share of contributions that had it, in %."""
    staleness = run.summary.get("staleness")
    counts = staleness.get("histogram") if isinstance(staleness, dict) else None
    if not isinstance(counts, dict) or not counts:
        return None
    known = {int(k): float(n) for k, n in counts.items() if str(k).isdecimal()}
    total = sum(known.values())
    ages = range(max(known, default=0) + 2)
    if total <= 0:
        return None
    return [float(a) for a in ages], [100 * known.get(a, 0.0) / total for a in ages]
