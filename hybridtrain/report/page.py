"""One HTML file that needs nothing else: no script, no font, no image from anywhere.

A page is a title and parts; each part is made by one of the functions below, which escape whatever
they are given. Wide tables scroll on their own, so that the page itself fits a phone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import NewType

from hybridtrain.errors import UserError

Part = NewType("Part", str)  # a piece of HTML, escaped already

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; line-height: 1.2; } h2 { font-size: 1.15rem; margin-top: 2rem; }
figure { margin: 1rem 0; } figcaption { font-size: .9rem; opacity: .8; }
figure svg { width: 100%; height: auto; background: #fff; border-radius: .3rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .25rem .7rem .25rem 0; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
thead th { border-bottom: 1px solid; } tbody tr + tr td { border-top: 1px solid #8884; }
"""


def heading(text: str) -> Part:
    """The beginning of a section."""
    return Part(f"<h2>{escape(text)}</h2>")


def paragraph(text: str) -> Part:
    """Plain text."""
    return Part(f"<p>{escape(text)}</p>")


def figure(svg: str, caption: str = "") -> Part:
    """A drawing of :mod:`hybridtrain.report.charts`, as wide as the page."""
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return Part(f"<figure>{svg}{below}</figure>")


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Part:
    """One line per row; the first column names it, the others are figures."""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    inner = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return Part(f'<div class="wide"><table>{inner}</table></div>')


def page(title: str, parts: Iterable[Part]) -> str:
    """The whole file."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def write(path: Path, text: str, option: str) -> None:
    """Write a page that was asked for with ``option``.

    Raises:
        UserError: if it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{option}={path} could not be written: {error}") from error
