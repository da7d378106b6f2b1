"""No text of a user's becomes a tag, whatever it is a part of."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridtrain.report import page, svg
from hybridtrain.report.charts import style

EVIL = '<b>&"'


@pytest.mark.parametrize(
    "made",
    [
        page.heading(EVIL),
        page.paragraph(EVIL),
        page.note(EVIL),
        page.code(EVIL),
        page.link(Path(EVIL), EVIL, Path()),
        page.figure("", EVIL),
        page.legend([(EVIL, style(0))]),
        page.details(EVIL, []),
        page.table([EVIL], [[EVIL]]),
        page.page(EVIL, [], EVIL),
        svg.text("ink", 0, 0, EVIL),
        svg.document(1, 1, EVIL, EVIL, []),
    ],
)
def test_it_is_shown_as_it_is(made: str) -> None:
    assert "<b>" not in made and "&lt;b&gt;&amp;" in made
