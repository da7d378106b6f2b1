"""Charts as SVG text for a page; needs matplotlib (extra ``report``).

The same data give the same text, so pages can be compared. Lines differ in colour and in dashes;
the colours are those of Okabe and Ito (Color Universal Design, 2008), which colour-blind readers
can tell apart, without the yellow, which is hard to see on white.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from textwrap import wrap
from typing import Any

import numpy as np

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
SIZE_INCHES = (4.6, 3.1)  # text stays legible at the width of a phone
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "hybridtrain",  # reproducible ids
    "text.parse_math": False,  # names may contain dollar signs
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
    """Look of a line in figure and legend. ``rest``: thin and grey, shared by many lines."""

    colour: str
    dashes: tuple[float, ...] = ()
    rest: bool = False


REST = Style("#b5b5b5", rest=True)


def style(number: int) -> Style:
    """The style of the line with this number; from the ninth on the same for all."""
    return Style(COLOURS[number], DASHES[number]) if number < len(COLOURS) else REST


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart: ``y`` against ``x``, of equal length."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: Style | None = None  # default: by position
    band: tuple[Sequence[float], Sequence[float]] | None = None  # from, to


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
        marks: mark the points; a single point is always marked.
        legend: draw a legend if there are several lines.
        fit_y: fit the y axis to the data instead of starting at 0.
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
    if each.band is not None:
        axes.fill_between(each.x, *each.band, alpha=0.15, color=look.colour, linewidth=0)


_NAME = 20  # characters of a name in one line, beside a bar
MOST_BINS = 60  # of a histogram
OLDEST_SHARE = 0.005  # of the contributions: the oldest ones share the last bin


def staleness_chart(
    names: Sequence[str],
    ages: Sequence[Mapping[int, float]],
    styles: Sequence[Style] = (),
    *,
    legend: bool = True,
) -> str:
    """Histograms on the same axes, as outlines: shares of the contributions by their staleness.

    Args:
        ages: staleness in updates -> contributions, of each name.
    """
    counts = np.zeros((len(ages), 1 + max(max(each) for each in ages)))
    for row, each in zip(counts, ages, strict=True):
        row[list(each)] = list(each.values())
    shares = 100 * counts / counts.sum(1, keepdims=True)
    young = int((shares.cumsum(1) < 100 * (1 - OLDEST_SHARE)).sum(1).max())
    last = min(young + 1, counts.shape[1] - 1)
    width = -(-(last + 1) // MOST_BINS)
    begins = np.arange(0, last + 1, width)
    centres = np.append(begins, begins[-1] + width) + (width - 1) / 2
    binned = np.pad(np.add.reduceat(shares, begins, axis=1), ((0, 0), (0, 1)))

    def draw(axes: Any) -> None:
        for number, (name, heights) in enumerate(zip(names, binned, strict=True)):
            look = styles[number] if styles else style(number)
            dashes = (0, look.dashes) if look.dashes else "-"
            drawn = {"color": look.colour, "linestyle": dashes}
            axes.step(centres, heights, where="mid", label=name, **drawn)
            axes.fill_between(centres, heights, step="mid", alpha=0.12, color=look.colour)
        more = f" ({begins[-1]}: and more)" if counts.shape[1] > begins[-1] + width else ""
        axes.set(xlabel=f"staleness in updates{more}", ylabel="% of contributions")
        axes.set_ylim(bottom=0)
        axes.locator_params(axis="x", integer=True)

    return picture(draw, legend=legend and len(names) > 1)


def length_chart(
    names: Sequence[str],
    lengths: Sequence[float | None],
    xlabel: str,
    styles: Sequence[Style] = (),
) -> str:
    """Horizontal bars with names and lengths (None: unknown), the first on top.

    The height grows with their number, and with the lines of the names.
    """
    known = [x or 0.0 for x in lengths]
    lines = [wrap(name, _NAME) or [""] for name in names]
    tall = max(map(len, lines), default=1)  # all bars are equally far apart
    places, height = range(len(known)), (0.1 + 0.18 * tall) * len(known)

    def draw(axes: Any) -> None:
        colours = [x.colour for x in styles] or COLOURS[0]
        axes.barh(places, known, color=colours, height=0.7)
        for place, length in enumerate(lengths):
            text = "not known" if length is None else number(length)
            at = (known[place], place)
            axes.annotate(text, at, (3, 0), textcoords="offset points", va="center", fontsize=9)
        axes.set_yticks(places, ["\n".join(each) for each in lines])
        axes.invert_yaxis()
        axes.set(xlabel=xlabel, xlim=(0, max(known, default=0.0) * 1.25 or 1.0))
        axes.grid(axis="y", visible=False)

    return picture(draw, size_inches=(SIZE_INCHES[0], 0.8 + height))


def shortened(text: str, length: int) -> str:
    """At most ``length`` characters; the middle is left out."""
    if len(text) <= length:
        return text
    half = (length - 1) // 2
    return f"{text[:half]}…{text[len(text) - (length - 1 - half) :]}"


def number(value: float) -> str:
    """The number with about four significant digits, with an exponent only if it is far from 1."""
    if not math.isfinite(value):
        return str(value)
    if value != 0 and not 1e-4 <= abs(value) < 1e9:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def picture(
    draw: Callable[[Any], None],
    legend: bool = False,
    size_inches: tuple[float, float] = SIZE_INCHES,
) -> str:
    """Call ``draw`` with a matplotlib ``Axes``; returns the figure as SVG.

    Raises:
        UserError: if matplotlib is not installed.
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
        with warnings.catch_warnings():  # the reader's fonts are asked, as text stays text
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            made.savefig(buffer, format="svg", metadata={"Date": None})
    return _inline(buffer.getvalue())


def _name_ticks(axis: Any) -> None:
    """Label a logarithmic axis with plain numbers, also between powers of ten if there are few."""
    low, high = axis.get_view_interval()
    few = low > 0 and high / low < 100

    def between(value: float, _: int) -> str:
        return number(value) if few and f"{value:e}"[0] in "25" else ""

    axis.set_major_formatter(lambda value, _: number(value))
    axis.set_minor_formatter(between)


def _inline(svg: str) -> str:
    """The SVG without file header, metadata and size, for embedding; the page sets the width."""
    start = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", start, flags=re.DOTALL)
    return re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", body, count=1).strip()
