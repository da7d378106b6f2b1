"""``scripts/straggler.py``: what it makes of what was measured, and one short run of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from benchmarks.parts import straggler as core

from tests.support.scripts import loaded

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/straggler.py"


@pytest.fixture(scope="module")
def straggler() -> ModuleType:
    return loaded("straggler")


def note(began: float, ended: float, waited: float, samples: float) -> dict[str, float]:
    return {"began": began, "ended": ended, "waited": waited, "samples": samples, "known": True}


def test_the_ideal_is_what_the_workers_would_do_if_they_never_waited(straggler: ModuleType) -> None:
    work = straggler.Work(0.1, 3.0, 10.0, 1, 10, 8)
    notes = [note(0.0, 10.0, 5.0, 500.0), note(0.0, 10.0, 0.0, 500.0)]
    found = core.measured("hybrid", work, notes, 1000)
    assert (found.samples_per_s, found.ideal) == (100.0, 100.0 + 50.0)
    assert found.share == pytest.approx(2 / 3) and found.waited == [0.5, 0.0]
    assert found.nominal == pytest.approx(10 * (10 + 10 / 3))
    wasted = core.measured("backup", work, notes, 750)
    assert (wasted.samples_per_s, wasted.share) == (75.0, 0.5)
    silent = [{**each, "known": False} for each in notes]
    assert core.measured("ddp", work, silent, 1000).share is None


def test_medians_are_taken_run_by_run(straggler: ModuleType) -> None:
    def run(strategy: str, speed: float, ideal: float) -> object:
        own = [ideal / 2] * 2
        return straggler.Measured(
            *(strategy, 2, speed, ideal, speed / ideal, own, [0.1, 0.2], [1.0, 1.0], 100.0)
        )

    runs = [run("a", 50, 100), run("b", 99, 100), run("a", 60, 80), run("a", 10, 100)]
    first, second = straggler.summarise(runs, ["a", "b"], [2])
    assert (first["share"], first["lowest"], first["highest"]) == (0.5, 0.1, 0.75)
    assert (second["share"], second["samples_per_s"]) == (0.99, 99)


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["--workers", "1"], "a straggler needs company"),
        (["--slower", "0"], "--slower must be above 0"),
        (["asinc"], "there is no strategy 'asinc'"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    straggler: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    fragment: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["straggler.py", *arguments])
    try:
        code = straggler.main()
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert code == 2 and fragment in err and out == ""


@pytest.mark.slow
def test_a_short_run_shows_that_waiting_for_a_straggler_costs(tmp_path: Path) -> None:
    out, png = tmp_path / "out.json", tmp_path / "out.png"
    short = ["--workers", "2", "--repeats", "1", "--seconds", "2", "--epochs", "1"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "hybrid", "async", *short, f"--json={out}", f"--png={png}"],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    hybrid, free = json.loads(out.read_text())["rows"]
    assert hybrid["share"] < 0.75 * free["share"], "no clock is compared, only waiting"
    assert "| 2 | `async` |" in done.stdout and png.stat().st_size > 5000
