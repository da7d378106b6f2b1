"""``scripts/compression.py``: what it makes of its runs, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hybridtrain.report.history import RunCurve
from hybridtrain.report.runs import Run
from tests.support.scripts import loaded

script: Any = loaded("compression")


def run(sent: int, saved: int, losses: list[float]) -> Run:
    handed = {"sent_bytes": sent, "saved_bytes": saved}
    figures = {"updates": 10, "samples": 100, "handed_over": handed, "metrics": {"test/acc": 0.5}}
    updates = [5.0, 10.0]
    curve = RunCurve({"updates": updates, "val/loss": losses, "train_loss": [3.0, 1.0]})
    return Run(Path(), summary=figures, curve=curve)


def test_the_table_has_bytes_of_an_update_and_means_over_the_seeds() -> None:
    rows = [
        script.row_of("none", [run(40_000, 0, [3.0, 1.0]), run(40_000, 0, [3.0, 2.0])]),
        script.row_of("int8", [run(10_000, 30_000, [3.0, 4.0])]),
    ]
    assert script.table(rows).splitlines()[2:] == [
        "| none | 4.0 | 1 | 1.000 | 1.500 (1.000–2.000) | 0.500 |",
        "| int8 | 1.0 | 4 | 1.000 | 4.000 (4.000–4.000) | 0.500 |",
    ]


def test_the_picture_is_written(tmp_path: Path) -> None:
    script.draw({"none": [run(40_000, 0, [3.0, 1.0])]}, tmp_path / "drawn.svg")
    assert "MB handed over" in (tmp_path / "drawn.svg").read_text()


def test_no_seeds_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["compression.py", "--seeds", "0"])
    with pytest.raises(SystemExit):
        script.parse()
    assert "--seeds 0 was given; at least 1 is needed" in capsys.readouterr().err
