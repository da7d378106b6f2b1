"""Which of many cases run every time, and which among the slow tests."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from types import MappingProxyType
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


def by_value(value: Any) -> str | None:
    """The name of a case's tuple: pytest's would be another for each case, as if all differed."""
    return "+".join(map(str, value)) if isinstance(value, tuple) else None


MANY = 12  # cases of one test
LOTS = 25


def every_pair(names: Sequence[str], samples: Mapping[str, int] = MappingProxyType({})) -> set[str]:
    """Names of cases (``test[a-b-c]``) so that of each test all pairs of values occur.

    Of a test with at most ``MANY`` cases it is all of them; where more than ``LOTS`` are left, so
    many, or more if every value is to occur. Of a test in ``samples`` it is so many, at most, as
    that says, drawn with the same seed each time. More than ``MANY`` whole numbers at one place are
    seeds, which need not all occur. Most faults need two values to come together (Kuhn, Wallace,
    Gallo, *Software Fault Interactions*, IEEE TSE 2004).
    """
    tests: defaultdict[tuple[str, int], list[tuple[str, list[Any]]]] = defaultdict(list)
    for name in names:
        test, _, case = name.partition("[")
        values = list(enumerate(case[:-1].split("-")))
        tests[test, len(values)].append((name, values))
    kept: defaultdict[str, list[str]] = defaultdict(list)
    for (test, n_values), cases in tests.items():
        cases = _without_seeds(cases)
        random.Random(0).shuffle(cases)
        if n_values > 2 and len(cases) > MANY:
            cases = _with_all(cases, lambda values: set(combinations(values, 2)))
        if len(cases) > LOTS:
            chosen = _with_all(cases, set)
            rest = [case for case in cases if case not in chosen]
            cases = [*chosen, *rest[: max(LOTS - len(chosen), 0)]]
        kept[test] += [name for name, _ in cases]
    for test, most in samples.items():
        random.Random(0).shuffle(kept[test])
        del kept[test][most:]
    return {name for found in kept.values() for name in found}


def _without_seeds(cases: list[tuple[str, list[Any]]]) -> list[tuple[str, list[Any]]]:
    """The cases with the values that have to occur."""
    places: defaultdict[int, set[str]] = defaultdict(set)
    for _, values in cases:
        for place, value in values:
            places[place].add(value)
    seeds = {p for p, found in places.items() if len(found) > MANY and all(map(str.isdigit, found))}
    return [(name, [v for v in values if v[0] not in seeds]) for name, values in cases]


def _with_all(
    cases: list[tuple[str, list[Any]]], parts: Callable[[list[Any]], set[Any]]
) -> list[tuple[str, list[Any]]]:
    """The cases that have a part which none before has."""
    seen: set[Any] = set()
    chosen = []
    for name, values in cases:
        if not parts(values) <= seen:
            seen |= parts(values)
            chosen.append((name, values))
    return chosen


def first_of_all(names: Sequence[str], most: int) -> set[str]:
    """``most`` of these names of cases, so that as many values as possible occur."""
    left = [(name, set(enumerate(name.partition("[")[2][:-1].split("-")))) for name in names]
    kept: set[str] = set()
    seen: set[tuple[int, str]] = set()
    while left and len(kept) < most:
        chosen = max(left, key=lambda case: len(case[1] - seen))  # the first of several
        left.remove(chosen)
        kept.add(chosen[0])
        seen |= chosen[1]
    return kept


def rotated(items: Sequence[Any], by: int) -> list[Any]:
    """Begun with another one each time, so that one of each row also is one of each column."""
    by %= len(items)
    return [*items[by:], *items[:by]]
