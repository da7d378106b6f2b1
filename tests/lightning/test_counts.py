"""The table of what each strategy counts is what real fits come to."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.picking import but_slow
from tests.support.counts import PAGE, STRATEGIES, by_hand, counted, ended, put, table, written

PARTS = (counted, by_hand, ended)


def test_the_page_has_all_strategies() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert list(written(page)) == list(STRATEGIES)
    assert put(page, {}) == page and table(written(page))[2].count("|") == 10


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("strategy", "part"),
    but_slow(
        [(strategy, part) for strategy in STRATEGIES for part in PARTS],
        lambda case, n: case not in [("hybrid", counted), ("async", by_hand), ("easgd", counted)],
    ),
)
def test_the_page_says_what_is_measured(
    strategy: str, part: Callable[[str], dict[str, str]]
) -> None:
    page = written(PAGE.read_text(encoding="utf-8"))[strategy]
    cells = part(strategy)
    for name, cell in cells.items():
        told = page[name]
        alike = strategy in MAY_DIFFER and _of_one(cell) == _of_one(told)
        assert alike or cell == told, name


# Mini-batches of workers that were held back may make an update together, or each one.
MAY_DIFFER = ("ssp",)


def _of_one(cell: str) -> str:
    return cell.replace("mini-batches", "updates").replace("mini-batch", "update")
