"""``scripts/golden.py``: what it takes for a difference, and that its names are one file each."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from goldens import bad_inputs, trainings, virtual
from goldens.difference import differences


@pytest.mark.parametrize(
    ("then", "now", "paths"),
    [
        ({"a": [1, 2.0], "b": torch.ones(2)}, {"a": [1, 2.0], "b": torch.ones(2)}, []),
        ({"a": math.nan}, {"a": math.nan}, []),
        ({"a": 0.0}, {"a": -0.0}, ["a"]),
        ({"a": torch.zeros(2)}, {"a": -torch.zeros(2)}, ["a"]),
        ({"a": 1}, {"a": 1.0}, ["a"]),
        ({"a": 1}, {"a": True}, ["a"]),
        ({"a": 1, "b": 2}, {"b": 2, "c": 3}, ["a", "c"]),
        ({"a": [1, 2]}, {"a": [1, 3, 4]}, ["a", "a[1]"]),
        ([torch.ones(2)], [torch.ones(2, 1)], ["[0]"]),
        ([torch.ones(2)], [torch.ones(2).double()], ["[0]"]),
        ({"x": {"text": "a" * 99 + "b"}}, {"x": {"text": "a" * 99 + "c"}}, ["x/text"]),
        (None, {"a": 1}, [""]),
    ],
)
def test_every_bit_is_a_difference_and_has_a_place(then: Any, now: Any, paths: list[str]) -> None:
    assert [each.path for each in differences(then, now)] == paths


def test_a_difference_shows_how_large_it_is_and_where_texts_part() -> None:
    (found,) = differences([torch.tensor([1.0, 2.0])], [torch.tensor([1.0, 2.5])])
    assert found.size == 0.5
    (found,) = differences("a" * 99 + "then", "a" * 99 + "now")
    assert found.then.endswith("then") and found.now.endswith("now")


def test_every_strategy_is_compared_on_every_task() -> None:
    found = [*trainings.cases(), *virtual.cases()]
    assert len({case.name for case in found}) == len(found)
    for strategy in trainings.STRATEGIES:
        for task in trainings.TASKS:
            names = [each.strategy.partition(",")[0] for each in found if each.task == task]
            assert strategy in names, (strategy, task)
    assert len(set(bad_inputs.RUNS)) == len(bad_inputs.RUNS) >= 15
