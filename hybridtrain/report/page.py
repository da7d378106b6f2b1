"""One self-contained HTML file: no script, no external font or image.

A page is a title and parts. The functions below make parts and escape everything that is not a
``Part``, so no value of a configuration can become a tag. Wide tables scroll on their own, so the
page itself fits a phone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from urllib.parse import quote

from hybridtrain.errors import UserError
from hybridtrain.report.charts import Style, number
from hybridtrain.report.svg import escape
from hybridtrain.util.files import reason_of, write_named

_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; color: #1a1a1a;
  background: #fff; max-width: 76rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; border-bottom: 1px solid #bbb; }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
p { margin: .5rem 0; max-width: 48rem; overflow-wrap: anywhere; }
a { color: #0b57a4; }
code { font-size: .9em; overflow-wrap: anywhere; }
.sub { color: #555; margin: 0 0 1rem; }
.note { background: #fff7e0; border-left: 4px solid #c98a00; padding: .4rem .75rem; }
.wide { overflow-x: auto; margin: .5rem 0 1rem; border: 1px solid #ddd; width: fit-content;
  max-width: 100%; max-height: 36rem; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; text-align: right; vertical-align: top; white-space: nowrap; }
th { background: #f2f2f2; position: sticky; top: 0; z-index: 1; white-space: normal; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff;
  white-space: normal; overflow-wrap: anywhere; min-width: min(11rem, 34vw); max-width: 14rem; }
th:first-child { background: #f2f2f2; z-index: 2; }
td.text, th.text { text-align: left; }
td.long { text-align: left; white-space: normal; overflow-wrap: anywhere;
  min-width: min(14rem, 40vw); }
tbody tr + tr td { border-top: 1px solid #e4e4e4; }
tr.bad td { color: #9b1c1c; }
.figures { display: grid; gap: 1.5rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)); }
figure { margin: 1rem 0; max-width: 40rem; min-width: 0; }
.figures figure { margin: 0; }
figure > svg { display: block; width: 100%; height: auto; }
figcaption { font-size: .875rem; font-weight: 600; color: #333; }
ul.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .1rem 1rem; margin: .25rem 0 0;
  padding: 0; font-size: .8125rem; }
ul.legend li { display: flex; align-items: center; gap: .35rem; overflow-wrap: anywhere; }
ul.legend svg { flex: none; }
details { margin: .5rem 0; }
summary { cursor: pointer; }
"""


_MARK = re.compile(r"((?<=\w)[./_=](?=\w))")


class Part(str):
    """HTML that is already escaped."""

    __slots__ = ()


Content = Part | str | float | None  # of a paragraph or a cell; None: unknown


def heading(text: str, level: int = 2) -> Part:
    """A heading that begins a section."""
    return Part(f"<h{level}>{escape(text)}</h{level}>")


def paragraph(*contents: Content) -> Part:
    """A paragraph of text, links and code."""
    return Part(f"<p>{''.join(map(_html, contents))}</p>")


def note(*contents: Content) -> Part:
    """A highlighted paragraph."""
    return Part(f'<p class="note">{"".join(map(_html, contents))}</p>')


def code(text: str) -> Part:
    """Code, or the name of a file."""
    return Part(f"<code>{escape(text)}</code>")


def setting(text: str) -> Part:
    """The name of a setting."""
    return Part(f"<code>{_breakable(text)}</code>")


def _breakable(text: str) -> str:
    """Names may go on in the next line behind a mark within them, and only there."""
    return _MARK.sub(r"\1<wbr>", escape(text))


def link(target: Path, text: str, folder: Path) -> Part:
    """A link to a file, relative to ``folder``, the page's own."""
    relative = Path(os.path.relpath(target, folder)).as_posix()
    return Part(f'<a href="{escape(quote(f"./{relative}"))}">{escape(text)}</a>')


def figure(svg: str, caption: str = "", key: str = "") -> Part:
    """A chart of :mod:`hybridtrain.report.charts` with caption and :func:`legend` (``key``)."""
    above = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return Part(f"<figure>{above}{svg}{key}</figure>")


def figures(each: Iterable[Part]) -> Part:
    """Figures side by side as far as there is room."""
    return Part(f'<div class="figures">{"".join(each)}</div>')


def legend(entries: Iterable[tuple[str, Style]]) -> Part:
    """A legend as text, which keeps its size where the figure shrinks."""
    lines = "".join(f"<li>{_swatch(look)}<span>{escape(x)}</span></li>" for x, look in entries)
    return Part(f'<ul class="legend">{lines}</ul>')


def _swatch(look: Style) -> str:
    dashes = f' stroke-dasharray="{",".join(map(str, look.dashes))}"' if look.dashes else ""
    return (
        '<svg width="28" height="8" aria-hidden="true"><line x1="0" y1="4" x2="28" y2="4" '
        f'stroke="{look.colour}" stroke-width="2.5"{dashes}/></svg>'
    )


def details(summary: str, parts: Iterable[Part]) -> Part:
    """Parts that are folded away until the reader opens them."""
    return Part(f"<details><summary>{escape(summary)}</summary>{''.join(parts)}</details>")


def table(
    heads: Sequence[str], rows: Sequence[Sequence[object]], bad: Collection[int] = ()
) -> Part:
    """A table; its first column stays visible while the others scroll.

    Columns of numbers are aligned to the right, columns with words to the left.

    Args:
        bad: numbers of rows that are red.
    """
    words = [any(_is_text(row[i]) for row in rows) for i in range(len(heads))]
    top = "".join(
        f"<th{_kind('text' if w else '')}>{_breakable(x)}</th>"
        for x, w in zip(heads, words, strict=True)
    )
    body = "".join(_row(row, words, number in bad) for number, row in enumerate(rows))
    return Part(
        f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _is_text(cell: object) -> bool:
    if not isinstance(cell, str) or cell in ("-", "–", ""):
        return False
    return not any(letter.isdigit() for letter in cell[:2])


def _row(row: Sequence[object], words: Sequence[bool], bad: bool) -> str:
    cells = "".join(
        f"<td{_kind(_cell_kind(x, w))}>{_html(x)}</td>" for x, w in zip(row, words, strict=True)
    )
    return f"<tr{_kind('bad' if bad else '')}>{cells}</tr>"


def _cell_kind(cell: object, words: bool) -> str:
    if isinstance(cell, str) and not isinstance(cell, Part) and len(cell) > 40:
        return "long"
    return "text" if words else ""


def _kind(name: str) -> str:
    return f' class="{name}"' if name else ""


def _html(content: object) -> str:
    match content:
        case Part():
            return content
        case None:
            return "–"
        case float():
            return number(content)
    return escape(str(content))


def page(title: str, parts: Iterable[Part], subtitle: str = "") -> str:
    """The HTML file's text."""
    below = f'\n<p class="sub">{escape(subtitle)}</p>' if subtitle else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>{below}\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def write(path: Path, text: str, option: str) -> None:
    """Write the file given by ``option``, as :func:`write_named` does.

    Raises:
        UserError: if it cannot be written.
    """
    try:
        write_named(path, text.encode(errors="replace"))  # names need not be UTF-8
    except (OSError, ValueError) as error:  # zero bytes
        reason = reason_of(error)
        raise UserError(f"{option}={path} could not be written: {reason}") from error
