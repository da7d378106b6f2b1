"""The table of what each strategy counts is what real fits come to."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hybridtrain import HybridStrategy
from hybridtrain.engine.options.schemes import parts_of
from tests.lightning.toys import Regression, fit, regression_data
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


FRAGMENTS = ("streaming_diloco",)  # a contribution is a part of the parameters
UNTOLD = ("hogwild",)  # contributions stay in the worker, but the first


@pytest.mark.few(3)
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("limit", [{}, {"max_steps": 7}], ids=["whole", "max_steps"])
@pytest.mark.parametrize("strategy", [x for x in STRATEGIES if x not in FRAGMENTS + UNTOLD])
def test_what_counted_and_what_was_dropped_was_handed_over(
    strategy: str, limit: dict[str, int], workers: int
) -> None:
    made = HybridStrategy(**parts_of(strategy))
    module, _ = fit(made, workers, 5, Regression, regression_data(85), max_epochs=2, **limit)
    stats = made.run_stats()
    n_bytes = sum(parameter.nbytes for parameter in module.parameters())
    handed_over = sum(stats["handed_over"].values()) / n_bytes
    assert handed_over == sum(stats["staleness"]["histogram"].values()) + sum(stats["dropped"])
    assert stats["samples"] == sum(stats["samples_per_worker"])
    assert limit or stats["samples"] == 2 * 85
    assert stats["effective_batch"] * stats["updates"] == pytest.approx(stats["samples"])


def test_a_worker_that_fetches_makes_no_contribution() -> None:
    made = HybridStrategy("async", exchange={"name": "accumulated", "n_push": 4, "n_fetch": 3})
    fit(made, 1, 5, Regression, regression_data(80), max_epochs=1)
    stats = made.run_stats()  # 16 mini-batches: 1, 4, 4, 4 and 3 of them, and fetches between
    assert sum(stats["staleness"]["histogram"].values()) == stats["updates"] == 5
    assert stats["lead"]["max"] == [0] and stats["dropped"] == [0]
    computing_s = stats["training_s"] * (1 - stats["waiting_share"][0])
    assert stats["step_s"][0] == pytest.approx(computing_s / 5, rel=0.3)


# Mini-batches of workers that were held back may make an update together, or each one.
MAY_DIFFER = ("ssp",)


def _of_one(cell: str) -> str:
    return cell.replace("mini-batches", "updates").replace("mini-batch", "update")
