"""Part of the fault matrix, with two workers that compute on the stand-in for a device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from trials import cell, work
from trials.cell import Case, cases, try_out, undisturbed_states

from hybridtrain.engine.worker.device import KINDS, transfers
from hybridtrain.engine.worker.device.cuda import CudaStreams
from tests.standin.accelerator import StandInAccelerator
from tests.standin.device import name_it
from tests.standin.lanes import Race
from tests.standin.state import NAME

pytestmark = pytest.mark.slow

PLACES: dict[str, dict[str, Any]] = {
    "two devices": {"devices": 2},
    "one device": {"devices": 1, "strategy": {"workers_per_device": 2}},
}
WHAT = ("kill", "exception", "hang", "oom", "nan")
WHERE = ("compute", "push", "update", "pull")


def wanted() -> list[tuple[Case, str]]:
    """The places take turns, so that each fault comes in both."""
    found = [
        case
        for case in cases(["hybrid", "async"], ["stop", "continue", "restart"])
        if case.kind in WHAT and case.phase in WHERE and case.worker == 1
    ]
    return [(case, list(PLACES)[number % 2]) for number, case in enumerate(found)]


@pytest.fixture
def races(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where every process writes what it finds of them; smaller trials, on the stand-in."""
    found = tmp_path / "races"
    name_it()
    monkeypatch.setitem(KINDS, NAME, CudaStreams)
    monkeypatch.setattr(transfers, "LEAST_BYTES", 64)
    monkeypatch.setattr(cell, "SIZE", work.Size(workers=2, samples=64, step_s=0.005))
    monkeypatch.setattr(cell, "HANG_S", 3.0)

    def note(self: Race, *said: Any) -> None:
        with found.open("a") as file:
            file.write(f"{os.getpid()}: {said}\n")

    monkeypatch.setattr(Race, "__init__", note, raising=False)
    yield found


@cache
def undisturbed(strategy: str, place: str) -> cell.States:
    """To the bit what a run comes to in which nothing goes wrong."""
    return undisturbed_states(strategy)


@pytest.mark.sampled(25)
@pytest.mark.parametrize(("case", "place"), wanted(), ids=str)
def test_whatever_fails_on_a_device_each_sample_counts_once(
    case: Case, place: str, races: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"accelerator": StandInAccelerator()} | PLACES[place]
    monkeypatch.setattr(work, "PLACE", there)
    base = undisturbed(case.strategy, place) if case.strategy == "hybrid" else None
    row = try_out(case, base)
    assert row.complaints == [], row
    assert not races.exists(), races.read_text()
