"""Pages that need nothing but themselves."""

from __future__ import annotations

import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hybridtrain.errors import UserError
from hybridtrain.report import charts, page

LINES = [charts.Series("a", [1, 2, 3], [3.0, 1.0, 2.0]), charts.Series("b", [1, 3], [1.0, 4.0])]


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.opened.append(tag)
        self.links += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href")]


def test_a_page_needs_no_network_and_fits_a_phone() -> None:
    pytest.importorskip("matplotlib", reason="drawing needs the extra `report`")
    figures = [charts.line_chart(LINES, "t", "loss"), charts.staleness_chart(["a"], [{0: 3, 9: 1}])]
    parts = [
        page.heading("h"),
        page.table(["n", "v"], [["x", 1]]),
        *map(page.figure, figures),
    ]
    text = page.page("title", parts)
    tags = Tags()
    tags.feed(text)
    assert tags.opened.count("svg") == 2 and "script" not in tags.opened
    assert all(link.startswith("#") for link in tags.links), "only to itself"
    assert 'name="viewport"' in text and "url(http" not in text and "@import" not in text
    assert not re.search(r"<svg[^>]* width=", text), "the page gives the width"


def test_the_same_figures_give_the_same_text() -> None:
    pytest.importorskip("matplotlib", reason="drawing needs the extra `report`")
    assert charts.line_chart(LINES, "t", "loss") == charts.line_chart(LINES, "t", "loss")


def test_what_users_say_is_escaped() -> None:
    sharp = "<b>&"
    text = page.page(sharp, [page.paragraph(sharp), page.table([sharp], [[sharp]])])
    assert "<b>" not in text and text.count("&lt;b&gt;&amp;") == 5


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"html=.*could not be written"):
        page.write(tmp_path / "none" / "x.html", "", "html")


def test_a_page_replaces_no_device_no_fifo_and_no_link(tmp_path: Path) -> None:
    null, fifo = tmp_path / "null", tmp_path / "fifo"
    null.symlink_to("/dev/null")
    os.mkfifo(fifo)
    page.write(null, "text", "html")
    with pytest.raises(UserError, match="could not be written: nothing reads this FIFO"):
        page.write(fifo, "text", "html")
    assert null.is_symlink() and fifo.is_fifo() and len(list(tmp_path.iterdir())) == 2


def test_figures_stand_to_the_right_and_words_to_the_left() -> None:
    text = page.table(["job", "n", "kind"], [["a", "12 %", "x"], ["b", None, None]])
    assert '<td>12 %</td><td class="text">x</td>' in text
    assert '<td>–</td><td class="text">–</td>' in text


def test_markup_passes_and_everything_else_is_escaped(tmp_path: Path) -> None:
    there = page.link(tmp_path / "a b&c" / "x.html", "<i>", tmp_path)
    assert there == '<a href="./a%20b%26c/x.html">&lt;i&gt;</a>'
    row = [there, "<i>", 0.000012345, 1234567.0, float("nan")]
    assert page.table(["a", "b", "c", "d", "e"], [row], bad=[0]).endswith(
        f'<tr class="bad"><td class="text">{there}</td><td class="text">&lt;i&gt;</td>'
        "<td>1.23e-05</td><td>1,234,567</td><td>nan</td></tr></tbody></table></div>"
    )


def test_lines_differ_in_colour_and_dashes_and_the_ninth_is_one_of_the_rest() -> None:
    looks = [charts.style(n) for n in range(9)]
    assert len({x.colour for x in looks[:8]}) == len({x.dashes for x in looks[:8]}) == 8
    assert [x.rest for x in looks] == [False] * 8 + [True]


@pytest.mark.few(1)
@pytest.mark.parametrize("values", [[1.0, 3.0, 0.001], [1.0, 2.0, 6.0], [30.0, 31.0, 32.0]])
def test_logarithmic_axes_have_plain_numbers(values: list[float]) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs the extra `report`")
    svg = charts.line_chart([charts.Series("$a$", [1, 2, 3], values)], "$x$", "y", ylog=True)
    words = re.findall(r"<text[^>]*>([^<]*)<", svg)
    assert "$x$" in words and not any("mathdefault" in word for word in words)
    assert sum(word.replace(".", "").isdigit() for word in words) >= 4
