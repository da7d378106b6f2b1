"""Pages that need nothing but themselves."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hybridtrain import report
from hybridtrain.errors import UserError

LINES = [report.Series("a", [1, 2, 3], [3.0, 1.0, 2.0]), report.Series("b", [1, 3], [1.0, 4.0])]


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
    figures = [report.line_chart(LINES, "t", "loss"), report.bar_chart(LINES, "age", "share")]
    parts = [
        report.heading("h"),
        report.table(["n", "v"], [["x", 1]]),
        *map(report.figure, figures),
    ]
    text = report.page("title", parts)
    tags = Tags()
    tags.feed(text)
    assert tags.opened.count("svg") == 2 and "script" not in tags.opened
    assert all(link.startswith("#") for link in tags.links), "only to itself"
    assert 'name="viewport"' in text and "url(http" not in text and "@import" not in text
    assert not re.search(r"<svg[^>]* width=", text), "the page gives the width"


def test_the_same_figures_give_the_same_text() -> None:
    pytest.importorskip("matplotlib", reason="drawing needs the extra `report`")
    assert report.line_chart(LINES, "t", "loss") == report.line_chart(LINES, "t", "loss")


def test_what_users_say_is_escaped() -> None:
    sharp = "<b>&"
    text = report.page(sharp, [report.paragraph(sharp), report.table([sharp], [[sharp]])])
    assert "<b>" not in text and text.count("&lt;b&gt;&amp;") == 5


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"html=.*could not be written"):
        report.write(tmp_path / "none" / "x.html", "", "html")
