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
from hybridtrain.util.number_checks import is_number

MOST_POINTS = 200  # of a line
MOST_BARS = 24
FEW = 0.005  # of the contributions: too few to draw one by one
ACROSS = {  # what curves are drawn against: column, caption, axis
    "wall_s": ("wall time", "wall time in s, start-up and validations included"),
    "samples": ("samples", "samples trained on, all workers"),
    "updates": ("updates", "updates of the parameters"),
}


def curves_of(title: str, shown: Sequence[Shown]) -> Iterator[Part]:
    """Everything that can only be compared within one task."""
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
    """The loss in training, and the metric that the task watches, or else the first there is."""
    watched = [str(x.run.config.get("task.monitor")) for x in shown]
    found = dict.fromkeys(m for x in shown for m in x.run.curve.metrics)
    ours = [m for m in found if not m.startswith(("train", "lr-"))]
    return ["train_loss", *([m for m in watched if m in found] or ours)[:1]]


def _curves(shown: Sequence[Shown], metric: str) -> Iterator[Part]:
    """The metric against wall time, samples and updates."""
    what = "loss in training" if metric == "train_loss" else metric
    for column, (caption, axis) in ACROSS.items():
        drawn = [
            Series(x.name, *_thinned(*points), x.style)
            for x in shown
            if (points := x.run.curve.points(column, metric))[0]
        ]
        if drawn:
            svg = line_chart(
                *(drawn, axis, what),
                ylog=_spans_decades(drawn),
                marks=all(len(each.x) <= 30 for each in drawn) and len(drawn) <= len(COLOURS),
                legend=False,
                fit_y=True,
            )
            present = [x for x in shown if x.run.curve.points(column, metric)[0]]
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
    if any(_ages(x.run) for x in shown):
        yield _histogram([x for x in shown if _ages(x.run)])


def _histogram(shown: Sequence[Shown]) -> Part:
    """Shares of contributions by age; the few that are older than almost all are one bin."""
    counts = [_ages(x.run) for x in shown]
    oldest = max(max(each) for each in counts)
    last = next(
        age
        for age in range(oldest + 1)
        if all(
            sum(n for a, n in each.items() if a > age) <= FEW * sum(each.values())
            for each in counts
        )
    )
    last += last < oldest
    drawn = []
    for x, each in zip(shown, counts, strict=True):
        binned = [100 * each.get(age, 0) / sum(each.values()) for age in range(last)]
        drawn.append(Series(x.name, range(last + 2), [*binned, 100 - sum(binned), 0.0], x.style))
    axis = "staleness in updates" + (f" ({last}: and more)" if last < oldest else "")
    svg = bar_chart(drawn, axis, "% of contributions", legend=False)
    return figure(svg, "Staleness of what was applied", legend_of(shown))


def _ages(run: Run) -> dict[int, float]:
    """How many contributions were so old; empty where nobody knows."""
    staleness = run.summary.get("staleness")
    counts = staleness.get("histogram") if isinstance(staleness, dict) else None
    known = counts.items() if isinstance(counts, dict) else ()
    return {int(age): n for age, n in known if str(age).isdecimal() and is_number(n) and n > 0}
