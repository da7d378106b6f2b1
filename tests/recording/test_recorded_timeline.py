"""The timeline of a recorded run."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hybridtrain import HybridStrategy
from hybridtrain.engine.recording import Record, find_record, read_record
from hybridtrain.engine.recording.record_file import NOBODY, OUTCOMES, Writer
from hybridtrain.engine.recording.recorded_timeline import timeline_of
from hybridtrain.engine.recording.recorder import KINDS
from hybridtrain.engine.server.timeline import BarState
from hybridtrain.report.timeline import picture
from tests.lightning.toys import fit
from tests.support.headers import header

# Kind, worker, time, computing time, whether workers have made the update.
Event = tuple[str, int, float, float, bool]
Bars = list[tuple[int, str, float, float]]


def written(folder: Path, events: list[Event], whole_rounds: bool, kinds: Any = KINDS) -> Record:
    """A record of these events."""
    said: dict[str, Any] = header(2, kinds)
    said["requirements"] = {"parameters": "masters", "whole_rounds": whole_rounds}
    writer = Writer(folder / "record.bin", kinds)
    writer.tell({"header": said})
    for kind, worker, at_s, own_s, made in events:
        writer.event(kind, worker, 0, at_s, own_s, 1.0, made=made)
    writer.close()
    return read_record(folder / "record.bin")


def bars(record: Record, begin_s: float = 0.0) -> Bars:
    found = timeline_of(record, begin_s).bars
    return [(b.worker, str(b.doing), round(b.begin_s, 3), round(b.end_s, 3)) for b in found]


BEGIN: list[Event] = [("Install", 0, 9.0, 0, False), ("Install", 1, 10.0, 0, False)]


def test_a_worker_waits_until_it_computes(tmp_path: Path) -> None:
    """Draws are quick, and validation is no time."""
    record = written(
        tmp_path,
        [
            *BEGIN,
            ("Draw", 0, 10.0, 0, False),
            ("Push", 0, 11.0, 1, False),
            ("Updated", NOBODY, 11.0, 0, False),
            ("Push", 1, 12.0, 2, False),
            ("Dropped", 1, 12.0, 0, False),
            ("Paused", 0, 12.0, 0, False),
            ("Resumed", 0, 15.0, 0, False),
            ("Push", 0, 16.0, 1, False),
            ("Updated", NOBODY, 16.0, 0, False),
        ],
        whole_rounds=False,
    )
    assert bars(record) == [
        (0, "computing", 0, 1),
        (1, "dropped", 0, 2),
        (0, "waiting", 1, 2),
        (0, "computing", 2, 3),
    ]
    timeline = timeline_of(record, 0.0)
    assert timeline.updates == [1, 3] and timeline.complete
    assert timeline.staleness(timeline.bars[1]) == 1
    assert bars(record, 2.5) == [(0, "computing", 2, 3)]


def test_in_rounds_that_workers_have_made_all_begin_together(tmp_path: Path) -> None:
    """Later ones in the record have at least the time of those before."""
    record = written(
        tmp_path,
        [
            *BEGIN,
            ("Push", 0, 12.0, 2, True),
            ("Push", 1, 12.0, 1, True),
            ("Push", 0, 13.0, 1, True),
            ("Push", 1, 14.0, 2, True),
        ],
        whole_rounds=True,
    )
    assert bars(record) == [
        (0, "computing", 0, 2),
        (1, "computing", 0, 1),
        (1, "waiting", 1, 2),
        (0, "computing", 2, 3),
        (0, "waiting", 3, 4),
        (1, "computing", 2, 4),
    ]
    assert timeline_of(record, 0.0).updates == [2, 4]


def test_a_timeline_begins_behind_the_first_steps_which_take_longer(tmp_path: Path) -> None:
    pushes: list[Event] = [("Push", n % 2, 15.0 + n, 1.0, False) for n in range(12)]
    record = written(tmp_path, [*BEGIN, *pushes], whole_rounds=False)
    assert timeline_of(record).begin_s == 6
    assert timeline_of(record, 0.0).begin_s == 0


def test_an_older_record_does_not_say_when_updates_were_made(tmp_path: Path) -> None:
    kinds = [kind for kind in KINDS if kind not in OUTCOMES]
    record = written(tmp_path, [*BEGIN, ("Push", 0, 11.0, 1, False)], True, kinds)
    text = picture({"run": timeline_of(record, 0.0)}, "{} of training")
    assert "the record does not say when updates were made" in text


@pytest.mark.few(2)
@pytest.mark.parametrize("policy", ["hybrid", "async", {"name": "backup", "k": 1}, "hogwild"])
def test_a_run_of_two_workers_is_drawn_as_it_was_counted(tmp_path: Path, policy: Any) -> None:
    fit(HybridStrategy(policy, record=tmp_path), 2, 4, max_epochs=1)
    record = read_record(find_record(tmp_path))
    timeline, stats = timeline_of(record, 0.0), record.told["end"]["stats"]
    assert len(timeline.updates) == stats["updates"]
    dropped = [bar.worker for bar in timeline.bars if bar.doing is BarState.DROPPED]
    assert [dropped.count(worker) for worker in range(2)] == stats["dropped"]
    pushes = len(record.of_kind("Push"))
    assert sum(bar.doing is not BarState.WAITING for bar in timeline.bars) >= pushes
    for worker in range(2):
        own = [bar for bar in timeline.bars if bar.worker == worker]
        assert all(a.end_s <= b.begin_s + 1e-6 for a, b in pairwise(own))
    assert (
        picture({"run": timeline}, "{} of training").count("worker 1") == 2
    )  # and its description
