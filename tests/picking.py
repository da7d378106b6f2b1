"""Which of many cases run every time, and which among the slow tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest


def but_slow(cases: Sequence[Any], is_slow: Callable[[Any, int], bool]) -> list[Any]:
    """All of them, some marked; ``is_slow`` gets the case and its number."""
    return [
        pytest.param(*case, marks=pytest.mark.slow if is_slow(case, number) else ())
        for number, case in enumerate(cases)
    ]


def rotated(items: Sequence[Any], by: int) -> list[Any]:
    """Begun with another one each time, so that one of each row also is one of each column."""
    by %= len(items)
    return [*items[by:], *items[:by]]
