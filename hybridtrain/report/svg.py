"""SVG text for light and dark pages: the browser that shows a picture chooses its colours.

Shapes have classes; :data:`STYLE` gives each class its colours.
"""

from __future__ import annotations

import html
from collections.abc import Iterable

from hybridtrain.util.streams import printable

COLOURS = {  # of a class, on light pages and on dark ones
    "page": ("#ffffff", "#0d1117"),
    "ink": ("#1f2328", "#f0f6fc"),
    "dim": ("#59636e", "#9198a1"),
    "faint": ("#d1d9e0", "#3d444d"),
    "computing": ("#0072b2", "#56b4e9"),
    "waiting": ("#d98e00", "#f0b429"),
    "dropped": ("#c2410c", "#ff8f5a"),
}
_FONT = "13px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"
CHARACTER = 7.4  # width of this font, in the widest of them
Stroke = tuple[float, float, float, float]  # from x, y to x, y


def escape(text: str) -> str:
    """The text for HTML and SVG; characters that steer a terminal are escapes, too."""
    return html.escape(printable(text))


def _fills(page: int) -> str:
    each = (
        f".{name}{{fill:{pair[page]}}}.{name}-line{{stroke:{pair[page]}}}"
        for name, pair in COLOURS.items()
    )
    return "".join(each)


STYLE = (
    f"text{{font:{_FONT}}}.small{{font-size:11px}}.bold{{font-weight:600}}"
    ".middle{text-anchor:middle}.end{text-anchor:end}path{fill:none}"
    f"{_fills(0)}@media (prefers-color-scheme:dark){{{_fills(1)}}}"
)


def number(value: float) -> str:
    """A coordinate, to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


def rect(kind: str, x: float, y: float, width: float, height: float, more: str = "") -> str:
    """A rectangle; ``more``: further attributes."""
    places = zip(("x", "y", "width", "height"), (x, y, width, height), strict=True)
    drawn = " ".join(f'{name}="{number(value)}"' for name, value in places)
    return f'<rect class="{kind}" {drawn}{more}/>'


def strokes(kind: str, each: Iterable[Stroke], width: float = 1) -> str:
    """Straight lines."""
    drawn = "".join(f"M{number(a)} {number(b)}L{number(c)} {number(d)}" for a, b, c, d in each)
    return (
        f'<path class="{kind}-line" stroke-width="{number(width)}" d="{drawn}"/>' if drawn else ""
    )


def text(kind: str, x: float, y: float, content: str) -> str:
    """One line of text, on the base line ``y``."""
    return f'<text class="{kind}" x="{number(x)}" y="{number(y)}">{escape(content)}</text>'


def document(
    width: float, height: float, title: str, description: str, parts: Iterable[str]
) -> str:
    """The content of an SVG file; title and description are read to those who do not see it."""
    size = f"{number(width)} {number(height)}"
    page = rect("page", 0, 0, width, height, ' rx="6"')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{number(width)}" viewBox="0 0 {size}" '
        f'role="img">\n<title>{escape(title)}</title>\n<desc>{escape(description)}</desc>\n'
        f"<style>{STYLE}</style>\n" + "\n".join([page, *filter(None, parts)]) + "\n</svg>\n"
    )
