"""The judge is not blind: every kind of difference is seen, and a run that hangs is reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.case import Grade
from tests.parity.cases import CASES
from tests.parity.compare import Verdict, compare
from tests.parity.harness import Harness, Job

THEIRS: dict[str, Any] = {
    "weights": torch.tensor([1.0, -2.0]),
    "loss": 0.5,
    "hooks": ("one", "two", "three", "four"),
    "step": 7,
    "name": "adam",
    "nothing": None,
    "nan": torch.tensor([float("nan"), 1.0]),
}


def judge(**changed: Any) -> Verdict:
    return compare(THEIRS | changed, THEIRS, ["*"], ["*version"], 1e-4)


def test_equal_is_bitwise_not_a_number_included() -> None:
    assert judge().grade == Grade.BITWISE
    assert judge().compared == len(THEIRS)
    assert judge(version="2").grade == Grade.BITWISE  # ignored


def test_one_bit_is_rounding() -> None:
    one_bit = torch.nextafter(THEIRS["weights"], torch.tensor(9.0))
    verdict = judge(weights=one_bit)
    assert verdict.grade == Grade.ROUNDING
    assert 0 < verdict.largest < 1e-6
    assert judge(loss=0.5000001).grade == Grade.ROUNDING


@pytest.mark.parametrize(
    "changed",
    [
        {"weights": torch.tensor([1.0, -2.1])},
        {"weights": torch.tensor([1.0, -2.0, 0.0])},
        {"weights": torch.tensor([1.0, -2.0], dtype=torch.float64)},
        {"weights": torch.tensor([1.0, float("nan")])},
        {"hooks": ("one", "three", "two", "four")},
        {"hooks": ("one", "two", "three")},
        {"step": 8},
        {"name": "sgd"},
        {"nothing": 0},
        {"more": 1},
    ],
)
def test_anything_else_differs_and_is_named(changed: dict[str, Any]) -> None:
    verdict = judge(**changed)
    assert verdict.grade == Grade.DIFFERS
    assert next(iter(changed)) in verdict.explain()


def test_what_is_missing_differs() -> None:
    assert compare({}, THEIRS, ["*"], [], 1e-4).grade == Grade.DIFFERS


def test_every_theme_has_put_its_cases_in() -> None:
    assert len(CASES) > 250


@pytest.mark.slow
def test_a_run_that_hangs_is_killed_and_shows_its_stacks(tmp_path: Path) -> None:
    harness = Harness(tmp_path, 1)
    try:
        outcome = harness.outcome(Job(replace(CASES["optimizers/SGD"], limit_s=0.15), "hybrid", 2))
    finally:
        harness.close()
    assert outcome.error is not None and "hung" in outcome.error
    assert "most recent call first" in outcome.log
