"""``history.csv``: what is written is read again, and a killed run has left whole rows."""

from __future__ import annotations

import math
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from hybridtrain.report.history import HISTORY_FILE, History, RunCurve, read_history


def row(train_s: float, **more: float) -> dict[str, float]:
    return {"wall_s": train_s + 1, "train_s": train_s, "epoch": 0, "updates": 3, **more}


def test_a_metric_that_turns_up_late_gets_a_column_and_the_rows_before_stay(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.add(row(0.5, samples=8, train_loss=1.25))
    history.add(row(1.5, samples=16, train_loss=math.nan))
    history.add(row(2.5, samples=24, **{"val/a, b\n": 0.125}))
    history.add(row(3.5, samples=32))
    course = read_history(tmp_path)
    assert course.bad == 0 and course.metrics == ["val/a, b "]
    assert course.columns["samples"] == [8, 16, 24, 32]
    assert course.points("wall_s", "train_loss") == ([1.5], [1.25])
    assert course.points("samples", "val/a, b ") == ([24], [0.125])
    assert [x.name for x in tmp_path.iterdir()] == [HISTORY_FILE]


def test_a_disk_that_was_full_has_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History(tmp_path)
    for n, more in enumerate([{}, {"val/a": 0.5}, {"val/b": 0.5}]):
        late = row(n + 0.5, samples=n, **more)
        with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
            patch.setattr(
                "hybridtrain.report.history.write_whole", Mock(side_effect=OSError("full"))
            )
            history.add(late)
        history.add(late)
    course = read_history(tmp_path)
    assert course.bad == 0 and course.metrics == ["val/a", "val/b"]
    assert course.columns["samples"] == [0, 1, 2]


def test_rows_come_ever_more_seldom() -> None:
    history, times, t = History(Path("/dev")), [], 0.0
    history._columns = ["train_s"]
    history._widen = lambda *_: None  # type: ignore[method-assign]
    while t < 86_400:
        if history.due(t):
            times.append(t)
            history._next_s = t + max(0.1, 0.01 * t)
        t += max(0.05, t / 1000)
    assert 500 < len(times) < 1200


def test_a_new_run_in_the_same_folder_begins_anew(tmp_path: Path) -> None:
    History(tmp_path).add(row(1.0, samples=1))
    History(tmp_path).add(row(2.0, samples=2))
    assert read_history(tmp_path).columns["samples"] == [2]


def test_a_resumed_run_keeps_the_rows_up_to_its_checkpoint(tmp_path: Path) -> None:
    before = History(tmp_path)
    for updates in (2, 4, 6):
        before.add({**row(float(updates), samples=8 * updates), "updates": updates})
    History(tmp_path).resume_at(4, 32)
    assert read_history(tmp_path).columns["updates"] == [2, 4]


def test_what_is_logged_again_has_one_row(tmp_path: Path) -> None:
    """Rows of the checkpoint's last update may be of hooks that come behind it."""
    before, place = History(tmp_path), {**row(4.0, samples=32), "updates": 4}
    for metrics in ({"val": 1.0}, {"epoch_mean": 2.0}):
        before.add(place | metrics)
    again = History(tmp_path)
    again.resume_at(4, 32)
    at_once = {**row(0.0, samples=0), "updates": 0}
    for metrics in ({"val": 1.0}, {"epoch_mean": 2.0}, {"other": 3.0}):
        again.add(at_once | metrics)
    again.add({**row(1.0, samples=8), "updates": 1, "val": 5.0})
    columns = read_history(tmp_path).columns
    assert columns["updates"] == [4, 4, 4, 5]
    assert [x for x in columns["val"] if x == x] == [1.0, 5.0]


@pytest.mark.parametrize(
    ("text", "samples", "bad"),
    [
        ("{head}\n1,1,0,1,5,2\n2,2,0,2,10,", [5], 1),  # killed in the middle of a row
        ("{head}\n1,1,0,1,5,2\n2,2,x,2,10,1\n3,3,0,3,15,1\n", [5, 15], 1),
        ("{head}\n1,1,0,1\n", [], 1),
        ("{head}\n1,1,0\r,1,5,2\n2,2,0,2,10,1\n", [10], 1),
        ("{head}\r\n1,1,0,1,5,2\r\n", [5], 0),  # saved by a spreadsheet
        ("{head}\n", [], 0),
        ("something,else\n1,2\n", None, 2),
        ("\x00\x01\xff", None, 1),
        ("", None, 1),
    ],
)
def test_what_cannot_be_read_is_left_out_and_counted(
    tmp_path: Path, text: str, samples: list[float] | None, bad: int
) -> None:
    head = "wall_s,train_s,epoch,updates,samples,train_loss"
    (tmp_path / HISTORY_FILE).write_bytes(text.format(head=head).encode("latin-1"))
    course = read_history(tmp_path)
    assert (course.columns.get("samples"), course.bad) == (samples, bad)


def test_no_history_is_an_empty_one(tmp_path: Path) -> None:
    assert read_history(tmp_path) == RunCurve()


def test_a_history_that_cannot_be_written_leaves_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        History(tmp_path).add(row(0.5))
    assert not list(tmp_path.iterdir())


def test_a_history_that_is_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / HISTORY_FILE)
    assert read_history(tmp_path) == RunCurve(bad=1)


def test_a_resumed_run_has_sums_maxima_and_means_of_both_parts(tmp_path: Path) -> None:
    known = {"dropped": 12, "lead_max": 9, "staleness_mean": 2.0, "waiting_share": 0.5}
    History(tmp_path).add(row(3.0, samples=30, effective_batch=10.0, **known))
    history = History(tmp_path)
    history.resume_at(updates=3, samples=30)
    now = {"dropped": 1, "lead_max": 4, "staleness_mean": 1.0, "waiting_share": 0.1}
    history.add(row(1.0, samples=60, effective_batch=20.0, **now))
    last = {name: values[-1] for name, values in read_history(tmp_path).columns.items()}
    assert (last["updates"], last["samples"], last["train_s"], last["wall_s"]) == (6, 90, 4, 6)
    assert (last["dropped"], last["lead_max"]) == (13, 9)
    assert (last["staleness_mean"], last["effective_batch"]) == (1.5, 15.0)
    assert last["waiting_share"] == pytest.approx((0.5 * 3 + 0.1) / 4)


def test_a_damaged_quote_costs_its_row_alone(tmp_path: Path) -> None:
    history = History(tmp_path)
    for n in range(6000):
        history.add({**row(n, samples=n), "train_loss": 0.123456})
    path = tmp_path / HISTORY_FILE
    lines = path.read_text().split("\n")
    lines[2] = '"' + lines[2][1:]
    path.write_text("\n".join(lines))
    found = read_history(tmp_path)
    assert found.bad == 1 and len(found.columns["samples"]) == 5999
