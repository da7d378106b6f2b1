"""Which of many cases run every time, and which among the slow tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def but_slow(cases: Sequence[Any], is_slow: Callable[[Any, int], bool]) -> list[Any]:
    """All of them, some marked; ``is_slow`` gets the case and its number."""
    return [
        pytest.param(*case, marks=pytest.mark.slow if is_slow(case, number) else ())
        for number, case in enumerate(cases)
    ]


def by_default(values: Iterable[Any], *chosen: Any) -> list[Any]:
    """All of them, those that were not chosen marked slow; tuples are for several names."""
    values = list(values)
    assert all(each in values for each in chosen), f"{chosen} are not all of {values}"
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if value in chosen else pytest.mark.slow,
        )
        for value in values
    ]


def rotated(items: Sequence[Any], by: int) -> list[Any]:
    """Begun with another one each time, so that one of each row also is one of each column."""
    by %= len(items)
    return [*items[by:], *items[:by]]
