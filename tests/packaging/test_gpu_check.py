"""scripts/gpu_check.sh: what it says without a GPU, what it makes of results, and its loops."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import frame, gpu, gpu_costs, gpu_loops, rows, runs

from tests.packaging.test_scripts import complete, executable, script

assert complete is not None  # a fixture
ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_runs_nothing(complete: Path) -> None:
    executable(complete / "bin" / "python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    done = script("gpu_check.sh", complete)
    assert done.returncode == 3
    assert done.stderr.startswith("No GPU: torch") and "Nothing was checked" in done.stderr
    assert done.stdout == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_part_is_left_out() -> None:
    (row,) = gpu.rows(frame.Frame("gpu", frame.Options(), runs.Runner()))
    assert isinstance(row, rows.Skipped) and "no CUDA device" in row.reason


TESTS = '<testsuites><testsuite tests="{}" failures="{}" errors="0" skipped="{}"/></testsuites>'
ROW = rows.compare(("gpu", "1.2 G", "hybrid", "torchao"), [2.0], [1.0], "ms", rows.Goal(1))
ABSENT = rows.Skipped("gpu", "1.2 G: hybrid against torchao", "torchao cannot be imported (x)")
WRONG = rows.Skipped("gpu", "difference", "WRONG: parameters differ by 0.5, more than 0.0001")


def shown(folder: Path, codes: tuple[int, int], tests: tuple[int, int, int], *found: Any) -> Any:
    (folder / "tests.xml").write_text(TESTS.format(*tests))
    (folder / "gpu.json").write_text(json.dumps({"rows": [row.as_dict() for row in found]}))
    command = [sys.executable, str(ROOT / "scripts/gpu_table.py"), str(folder), *map(str, codes)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)


@pytest.mark.parametrize(
    ("codes", "tests", "found", "right"),
    [
        ((0, 0), (9, 0, 2), [ROW, ABSENT], True),  # slower than a peer is a figure, not a fault
        ((1, 0), (9, 1, 2), [ROW], False),
        ((0, 0), (9, 0, 9), [ROW], False),  # nothing was tested
        ((0, 0), (9, 0, 2), [ROW, WRONG], False),
        ((0, 0), (9, 0, 2), [], False),
        ((124, 0), (9, 0, 2), [ROW], False),
    ],
)
def test_one_table_says_what_is_right(
    tmp_path: Path, codes: Any, tests: Any, found: Any, right: bool
) -> None:
    done = shown(tmp_path, codes, tests, *found)
    assert done.returncode == (0 if right else 1), done.stdout + done.stderr
    assert f"{tests[0] - tests[1] - tests[2]} passed, {tests[1]} failed" in done.stdout
    assert ("| NO " in done.stdout) != right


def test_results_that_are_not_there_are_wrong(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/gpu_table.py"), str(tmp_path), "124", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "they took too long" in done.stdout and "failed (exit code 1)" in done.stdout


def test_its_ways_to_train_agree_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert gpu_loops.difference(2, {}, "cpu") < 1e-6
    assert 1e-7 < gpu_loops.difference(2, {"transport_dtype": "bf16"}, "cpu") < 1e-2
    assert gpu_loops.hybrid(gpu.TINY, 2, {}, "cpu") > 0
    assert gpu_loops.plain(gpu.TINY, 2, "cpu") > 0
    costs = gpu.costs_of(gpu_costs.costs(gpu.TINY, 4, "cpu"), 0.5)
    assert costs.out_s > 0 and costs.update_s > 0 and costs.backward.at(4) > 0
