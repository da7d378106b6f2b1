"""Drawings as SVG text, to be put into a page; needs matplotlib (extra ``report``).

The same figures give the same text, so that pages can be compared. Lines differ in colour and in
dashes; the colours are those of Okabe and Ito (Color Universal Design, 2008), which everybody can
tell apart, without the yellow, which is hard to see on white.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from hybridtrain.errors import UserError

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#7F5539")
DASHES = (
    (),
    (6, 2),
    (2, 1.5),
    (6, 2, 2, 2),
    (10, 3),
    (4, 1, 1, 1, 1, 1),
    (1, 1),
    (8, 2, 2, 2, 2, 2),
)
SIZE_INCHES = (4.6, 3.1)  # small: letters are still legible at the width of a phone
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # letters stay letters
    "svg.hashsalt": "hybridtrain",
    "text.parse_math": False,  # a dollar sign in a name is one
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e0e0e0",
    "grid.linewidth": 0.6,
}


@dataclass(frozen=True, slots=True)
class Style:
    """How a line looks, in a figure and in its legend. ``rest``: one of many, in the background."""

    colour: str
    dashes: tuple[float, ...] = ()
    rest: bool = False


REST = Style("#b5b5b5", rest=True)


def style(number: int) -> Style:
    """The look of the line of this number; from the ninth on all look alike."""
    return Style(COLOURS[number], DASHES[number]) if number < len(COLOURS) else REST


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart: ``y`` against ``x``, of equal length."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: Style | None = None  # else by its place


@dataclass(frozen=True, slots=True)
class Bars:
    """Horizontal bars, the first on top: names, lengths (None: not known) and looks."""

    names: Sequence[str]
    lengths: Sequence[float | None]
    styles: Sequence[Style] = field(default_factory=tuple)


def line_chart(
    series: Sequence[Series],
    xlabel: str,
    ylabel: str,
    *,
    xlog: bool = False,
    ylog: bool = False,
    marks: bool = False,
    legend: bool = True,
    fit_y: bool = False,
) -> str:
    """Lines on the same axes.

    Args:
        marks: show the points themselves; a single point always is.
        legend: draw one, where there are several lines (else the page has it).
        fit_y: let the ordinate show only what is needed, instead of everything from 0.
    """

    def draw(axes: Any) -> None:
        for number, each in enumerate(series):
            _line(axes, each, each.style or style(number), marks, len(series) > len(COLOURS))
        axes.set(
            xlabel=xlabel,
            ylabel=ylabel,
            xscale="log" if xlog else "linear",
            yscale="log" if ylog else "linear",
        )
        if not xlog and all(value >= 0 for each in series for value in each.x):
            axes.set_xlim(left=0)
        positive = all(value >= 0 for each in series for value in each.y)
        if not ylog and not fit_y and positive:
            axes.set_ylim(bottom=0)

    return picture(draw, legend=legend and len(series) > 1)


def _line(axes: Any, each: Series, look: Style, marks: bool, thin: bool) -> None:
    axes.plot(
        each.x,
        each.y,
        color=look.colour,
        linestyle=(0, look.dashes) if look.dashes else "-",
        linewidth=0.8 if look.rest or thin else 1.7,
        marker="o" if marks or len(each.x) == 1 else "",
        markersize=3.5,
        zorder=1 if look.rest else 2,
        label=each.label,
    )


def bar_chart(series: Sequence[Series], xlabel: str, ylabel: str, *, legend: bool = True) -> str:
    """A histogram of each: outlines, so that several can be told apart on the same axes."""

    def draw(axes: Any) -> None:
        for number, each in enumerate(series):
            look = each.style or style(number)
            dashes = (0, look.dashes) if look.dashes else "-"
            axes.step(
                each.x, each.y, where="mid", label=each.label, color=look.colour, linestyle=dashes
            )
            axes.fill_between(each.x, each.y, step="mid", alpha=0.12, color=look.colour)
        axes.set(xlabel=xlabel, ylabel=ylabel)
        axes.set_ylim(bottom=0)
        axes.locator_params(axis="x", integer=True)

    return picture(draw, legend=legend and len(series) > 1)


def length_chart(bars: Bars, xlabel: str) -> str:
    """Horizontal bars with their names and numbers, as many as there are."""
    known = [x or 0.0 for x in bars.lengths]
    places = range(len(known))

    def draw(axes: Any) -> None:
        colours = [x.colour for x in bars.styles] or COLOURS[0]
        axes.barh(places, known, color=colours, height=0.7)
        for place, length in enumerate(bars.lengths):
            text = "not known" if length is None else number(length)
            at = (known[place], place)
            axes.annotate(text, at, (3, 0), textcoords="offset points", va="center", fontsize=9)
        axes.set_yticks(places, [shortened(x, 18) for x in bars.names])
        axes.invert_yaxis()
        axes.set(xlabel=xlabel, xlim=(0, max(known, default=0.0) * 1.25 or 1.0))
        axes.grid(axis="y", visible=False)

    return picture(draw, size_inches=(SIZE_INCHES[0], 0.8 + 0.28 * len(known)))


def shortened(text: str, length: int) -> str:
    """At most ``length`` letters; the middle is left out."""
    if len(text) <= length:
        return text
    half = (length - 1) // 2
    return f"{text[:half]}…{text[len(text) - (length - 1 - half) :]}"


def number(value: float) -> str:
    """Four significant digits, and no exponent where a person would write none."""
    if not math.isfinite(value):
        return str(value)
    if value != 0 and not 1e-4 <= abs(value) < 1e9:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def can_draw() -> bool:
    """Whether there is a matplotlib."""
    return find_spec("matplotlib") is not None


def picture(
    draw: Callable[[Any], None],
    legend: bool = False,
    size_inches: tuple[float, float] = SIZE_INCHES,
) -> str:
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
    with rc_context(_SETTINGS):
        made = Figure(figsize=size_inches)
        axes = made.subplots()
        draw(axes)
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_scale() == "log":
                _name_ticks(axis)
        if legend:
            axes.legend(frameon=False, fontsize=9)
        made.set_layout_engine("tight", pad=0.8)
        buffer = io.StringIO()
        made.savefig(buffer, format="svg", metadata={"Date": None})
    return _inline(buffer.getvalue())


def _name_ticks(axis: Any) -> None:
    """Plain numbers along a logarithmic axis; between powers of ten where there are few of them."""
    low, high = axis.get_view_interval()
    few = low > 0 and high / low < 100

    def between(value: float, _: int) -> str:
        return number(value) if few and f"{value:e}"[0] in "25" else ""

    axis.set_major_formatter(lambda value, _: number(value))
    axis.set_minor_formatter(between)


def _inline(svg: str) -> str:
    """Without the head of a file of its own and its fixed size; the page gives it the width."""
    start = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", start, flags=re.DOTALL)
    return re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", body, count=1).strip()
