"""Drawings as SVG text, to be put into a page; needs matplotlib (extra ``report``).

The same figures give the same text, so that pages can be compared.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hybridtrain.errors import UserError


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart: ``y`` against ``x``, of equal length."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


def line_chart(
    series: Sequence[Series],
    xlabel: str,
    ylabel: str,
    *,
    xlog: bool = False,
    ylog: bool = False,
    marks: bool = False,
) -> str:
    """Lines on the same axes. ``marks``: show the points themselves."""

    def draw(axes: Any) -> None:
        for each in series:
            axes.plot(each.x, each.y, "o-" if marks else "-", label=each.label, markersize=4)
        axes.set(
            xlabel=xlabel,
            ylabel=ylabel,
            xscale="log" if xlog else "linear",
            yscale="log" if ylog else "linear",
        )
        if not ylog and all(value >= 0 for each in series for value in each.y):
            axes.set_ylim(bottom=0)

    return picture(draw, legend=len(series) > 1)


def bar_chart(series: Sequence[Series], xlabel: str, ylabel: str) -> str:
    """A histogram of each: outlines, so that several can be told apart on the same axes."""

    def draw(axes: Any) -> None:
        for each in series:
            axes.step(each.x, each.y, where="mid", label=each.label)
            axes.fill_between(each.x, each.y, step="mid", alpha=0.15)
        axes.set(xlabel=xlabel, ylabel=ylabel)
        axes.set_ylim(bottom=0)

    return picture(draw, legend=len(series) > 1)


def picture(draw: Callable[[Any], None], legend: bool = False) -> str:
    """What ``draw`` puts on a matplotlib ``Axes``, as SVG.

    Raises:
        UserError: if there is no matplotlib.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure  # no display, no global state
    except ModuleNotFoundError as error:
        raise UserError(
            "pages with figures need matplotlib, which is not installed; pip install matplotlib"
        ) from error
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "hybridtrain", "font.size": 11}):
        made = Figure(figsize=(7, 4), layout="constrained")
        axes = made.subplots()
        draw(axes)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        if legend:
            axes.legend(frameon=False, fontsize=9)
        buffer = io.StringIO()
        made.savefig(buffer, format="svg", metadata={"Date": None})
    return _inline(buffer.getvalue())


def _inline(svg: str) -> str:
    """Without the head of a file of its own and its fixed size; the page gives it the width."""
    start = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", start, flags=re.DOTALL)
    return re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", body, count=1).strip()
