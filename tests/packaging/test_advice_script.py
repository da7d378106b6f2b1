"""``scripts/advice.py``: what it makes of the summaries of its runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.scripts import loaded

SCRIPT = Path(__file__).parents[2] / "scripts/advice.py"


@pytest.fixture
def script() -> ModuleType:
    return loaded("advice")


@pytest.mark.parametrize("advised", [True, False])
def test_a_row_has_the_advised_and_the_measured_factor(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, advised: bool
) -> None:
    advice = {"strategy": "strategy=backup strategy.policy.k=3", "factor": 2.25}
    runs: list[list[str]] = []

    def summary_of(case: Any, strategy: list[str], given: Any) -> dict[str, Any]:
        runs.append(strategy)
        speed = 100.0 if strategy == ["strategy=hybrid"] else 200.0 + len(runs)
        return {"samples_per_s": speed, "advice": advice if advised else None}

    monkeypatch.setattr(script, "summary_of", summary_of)
    row = script.row(script.CASES[4], argparse.Namespace(repeats=2))
    start = "| `hybrid` | 4 | worker 3 3 times | "
    if not advised:
        assert row == f"{start}none | 100 | | |"
        return
    assert row == f"{start}`{advice['strategy']}` | 100, 202 | 2.25 | 2.02 |"
    usual = ["strategy=hybrid"]
    assert runs == [usual, advice["strategy"].split(), advice["strategy"].split(), usual]
