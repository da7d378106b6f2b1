"""Each strategy has a page, whose table of options is what its row of conf/strategy says."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import scheme_pages

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "schemes"
NAMES = sorted(page.stem for page in PAGES.glob("*.md"))


def test_every_strategy_has_a_page_that_is_linked() -> None:
    rows = {row.stem for row in (ROOT / "conf" / "strategy").glob("*.yaml")} - {"ddp"}
    assert set(NAMES) == rows | {"delay_tolerant"}
    strategies = (ROOT / "docs" / "strategies.md").read_text()
    assert [name for name in NAMES if f"(schemes/{name}.md)" not in strategies] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_the_options_as_they_are_and_a_small_picture(name: str) -> None:
    text = (PAGES / f"{name}.md").read_text()
    assert scheme_pages.refreshed(text, name) == text, "python scripts/scheme_pages.py"
    assert "\n```\n" in text and "**When.**" in text
    assert (PAGES / f"{name}.svg").stat().st_size <= 30_000
    if name != "hybrid":
        assert f"({name}.png)" in text
        assert (PAGES / f"{name}.png").stat().st_size <= 40_000


OF_GRADIENTS = {name for name in NAMES if "task=clusters" in scheme_pages.timeline_command(name)}


@pytest.mark.few(5)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow if n in OF_GRADIENTS - {"local_sgd"} else [])
        for n in NAMES
    ],
)
def test_a_timeline_is_what_its_command_draws(name: str) -> None:
    drawn = (PAGES / f"{name}.svg").read_text()
    assert scheme_pages.timeline(name) == drawn, f"python scripts/scheme_pages.py only={name}"
    assert ElementTree.fromstring(drawn).tag.endswith("svg")


def test_the_dial_shows_every_scheme_with_its_figures() -> None:
    figures = json.loads(scheme_pages.FIGURES.read_text())
    assert set(figures) == set(NAMES) - {"delay_tolerant"}
    assert scheme_pages.dial(figures) == scheme_pages.DIAL.read_text()
    waits = {name: each["waits"] for name, each in figures.items()}
    assert waits["synchronous"] > waits["hybrid"] > waits["ssp"] > 0.01 > waits["async"]


@pytest.mark.slow
def test_the_figures_of_the_dial_are_those_of_runs() -> None:
    figures = json.loads(scheme_pages.FIGURES.read_text())
    for name in ("hybrid", "async"):
        now = scheme_pages.figures_of(scheme_pages.run_of(name))
        assert now == pytest.approx(figures[name], rel=0.1)


def test_the_table_has_values_and_comments_of_the_row() -> None:
    table = scheme_pages.knobs("post_local_sgd").splitlines()
    assert table[2:4] == [
        "| `strategy.exchange.every.then` | `16` | a worker's own steps between two means, in the "
        "end |",
        "| `strategy.exchange.every.at` | `first_decay` | from where the learning rate falls for "
        "the first time; or after so many steps |",
    ]
    assert scheme_pages.knobs("hybrid") == "It has no options of its own."
    assert "| `strategy.update.initial` of `async_ada_da` | `1.0` |" in scheme_pages.knobs(
        "delay_tolerant"
    )


@pytest.mark.slow
def test_a_picture_is_one_run_under_the_scheme_and_under_hybrid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs the extra `report`")
    monkeypatch.setattr(scheme_pages, "RUN", (*scheme_pages.RUN[:-1], "seconds=10"))
    own, hybrid = scheme_pages.run_of("post_local_sgd"), scheme_pages.run_of("hybrid")
    scheme_pages.draw("post_local_sgd", own, hybrid, tmp_path / "drawn.png")
    assert own.strategy == "post_local_sgd" and own.seconds == pytest.approx(10, abs=1)
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")
