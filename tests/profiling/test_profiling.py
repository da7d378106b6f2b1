"""Spans add up, stay few, and become a table and a timeline."""

from __future__ import annotations

import io
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hybridtrain.engine.profiling import Phase, Track, timed
from hybridtrain.engine.profiling.profile_report import FIGURES, TIMELINE, Report
from hybridtrain.engine.profiling.time_spans import phase_of, short_name


class Clock:
    """Nanoseconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


class Worker:
    """A track with a clock of its own."""

    def __init__(self, limit: int = 1000) -> None:
        self.clock = Clock()
        self.track = Track("worker 0", limit, self.clock)

    def span(self, name: str, phase: Phase, ns: int, *inside: tuple[str, Phase, int]) -> None:
        self.track.begin(self.track.kind_of(name, phase))
        for each in inside:
            self.span(*each)
        self.clock.now += ns
        self.track.end()

    def steps(self, n: int, spans: int = 2) -> None:
        for _ in range(n):
            self.track.next_step(self.track.step + 1)
            for _ in range(spans):
                self.span("backward", Phase.BACKWARD, 3000)
            self.clock.now += 1000


def check_trace(path: Path) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """The format's rules, as Perfetto and the trace viewers need them; spans by track."""
    content = json.loads(path.read_text())
    assert content["displayTimeUnit"] in ("ms", "ns")
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    named: set[tuple[str, int, int]] = set()
    for event in content["traceEvents"]:
        assert isinstance(event["name"], str) and event["name"]
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        place = event["pid"], event["tid"]
        match event["ph"]:
            case "M":
                assert event["name"] in ("process_name", "process_sort_index", "thread_name")
                named.add((event["name"], *place))
            case "X":
                assert event["ts"] >= 0 and event["dur"] >= 0 and isinstance(event["cat"], str)
                assert all(isinstance(value, int) for value in event["args"].values())
                tracks[place].append(event)
            case other:
                raise AssertionError(f"an event of kind {other!r}")
    for pid, tid in tracks:
        assert ("thread_name", pid, tid) in named and ("process_name", pid, 0) in named
    for events in tracks.values():
        check_nesting(events)
    return tracks


def check_nesting(events: list[dict[str, Any]]) -> None:
    """Two spans of a track lie inside one another or apart; viewers draw nonsense otherwise."""
    open_until: list[float] = []
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        begin, end = event["ts"], event["ts"] + event["dur"]
        while open_until and open_until[-1] <= begin + 1e-3:
            open_until.pop()
        assert not open_until or end <= open_until[-1] + 1e-3, event
        open_until.append(end)


def test_own_times_add_up_to_the_time_that_has_passed() -> None:
    worker = Worker()
    worker.span("push", Phase.PUSH, 5, ("send", Phase.PUSH, 2), ("wait", Phase.WAIT, 30))
    worker.clock.now += 13  # in no span: the loop's
    worker.span("backward", Phase.BACKWARD, 50)
    assert worker.track.phases() == {
        Phase.PUSH: pytest.approx(7e-9),
        Phase.WAIT: pytest.approx(30e-9),
        Phase.BACKWARD: pytest.approx(50e-9),
        Phase.LOOP: pytest.approx(13e-9),
    }
    assert worker.track.seconds == pytest.approx(100e-9)
    assert worker.track.sums["push", Phase.PUSH].longest_ns == 37


def test_whatever_happens_in_a_validation_is_validation_but_a_checkpoint_is_one() -> None:
    worker = Worker()
    save = ("save", Phase.CHECKPOINT, 7)
    worker.span("run", Phase.VALIDATION, 10, ("meeting", Phase.WAIT, 5), save)
    worker.span("save", Phase.CHECKPOINT, 1, ("snapshot", Phase.WAIT, 4))
    assert worker.track.phases() == {
        Phase.VALIDATION: pytest.approx(15e-9),
        Phase.CHECKPOINT: pytest.approx(12e-9),
    }


def test_what_an_exception_leaves_open_ends_with_what_it_is_in() -> None:
    track = Track("t")
    outer, inner = track.kind_of("outer", Phase.HOOKS), track.kind_of("inner", Phase.DATA)
    track.begin(outer)
    track.begin(inner)
    track.end_all(outer)
    track.end_all(outer)  # told of an end without a beginning: nothing happens
    assert track.sums["inner", Phase.DATA].n == track.sums["outer", Phase.HOOKS].n == 1


def test_start_up_is_in_the_timeline_but_in_no_sum() -> None:
    worker = Worker()
    worker.span("setup", Phase.HOOKS, 100)
    worker.track.begin(worker.track.kind_of("install", Phase.SERVE))
    worker.clock.now += 50
    worker.track.restart()
    worker.clock.now += 7
    worker.track.end()
    assert worker.track.phases() == {Phase.SERVE: pytest.approx(7e-9)}
    assert len(worker.track.kind) == 2


@pytest.mark.parametrize("limit", [10, 64, 1000])
def test_a_long_run_keeps_few_spans_of_its_whole_length_and_the_sums_of_all(limit: int) -> None:
    worker = Worker(limit)
    worker.steps(5000)
    track = worker.track
    assert len(track.kind) < limit
    assert len(track.kind) >= limit // 4
    assert {step % track.every for step in track.steps} == {0}
    assert max(track.steps) > 5000 * 0.7 and min(track.steps) < 5000 * 0.3
    assert track.sums["backward", Phase.BACKWARD].n == 10_000 and track.n_steps == 5000


def test_one_step_of_many_spans_does_not_fill_the_memory() -> None:
    worker = Worker(limit=50)
    worker.steps(1, spans=10_000)
    assert len(worker.track.kind) < 50


def test_a_track_travels_in_plain_data() -> None:
    worker = Worker()
    worker.steps(3)
    again = Track.unpacked(json.loads(json.dumps(worker.track.packed())))
    assert again.packed() == worker.track.packed() and again.phases() == worker.track.phases()


def test_a_method_is_measured_once_whatever_it_does_and_only_in_this_object() -> None:
    class Owner:
        def work(self, x: int) -> int:
            return 1 // x

    track, owner, other = Track("t"), Owner(), Owner()
    timed(track, owner, "work", Phase.DATA)
    timed(track, owner, "work", Phase.DATA)
    timed(track, owner, "play", Phase.DATA)  # it has none: nothing to measure
    assert owner.work(1) == 1
    with pytest.raises(ZeroDivisionError):
        owner.work(0)
    assert other.work(1) == 1 and "work" not in vars(other)
    assert track.sums["work", Phase.DATA].n == 2


def test_lightnings_actions_are_known_by_what_they_are_about() -> None:
    assert phase_of("[_TrainingEpochLoop].train_dataloader_next") is Phase.DATA
    assert phase_of("[LightningModule]Net.transfer_batch_to_device") is Phase.DATA
    assert phase_of("[Strategy]HybridStrategy.backward") is Phase.BACKWARD
    assert phase_of("[Callback]Monitor{'a.b': 1}.on_train_batch_end") is Phase.HOOKS
    assert phase_of("[LightningModule]Net.optimizer_step") is None
    assert phase_of("run_training_epoch") is None
    assert short_name("[Callback]Monitor{'a': 'b.c'}.on_fit_end") == "Monitor.on_fit_end"


def shown(report: Report, width: int, folder: Path) -> list[str]:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    report.show(console, folder)
    text: Any = console.file
    return list(text.getvalue().splitlines())


@pytest.mark.parametrize(("width", "n_workers"), [(80, 2), (80, 4), (80, 9), (120, 2), (120, 12)])
def test_the_table_fits_whatever_the_width_and_says_who_is_missing(
    width: int, n_workers: int, tmp_path: Path
) -> None:
    workers = [Worker() for _ in range(n_workers)]
    for number, worker in enumerate(workers):
        worker.steps(3 + number)
    tracks = {number: worker.track for number, worker in enumerate(workers)}
    lines = shown(Report(tracks, (), n_workers + 1), width, tmp_path)
    assert all(len(line) <= width for line in lines if TIMELINE not in line)
    assert f"nothing is known of worker {n_workers}" in lines
    assert ("worker 1" in lines[2]) == (n_workers * 16 < width - 11)
    explained = any("copying gradients" in line for line in lines)
    assert explained == (width == 120)


def test_the_files_are_a_trace_and_figures(tmp_path: Path) -> None:
    worker = Worker(limit=100)
    worker.steps(100)
    report = Report({1: worker.track}, (Track("server"),), 2, cost_ns=60.0)
    report.write(tmp_path)
    tracks = check_trace(tmp_path / TIMELINE)
    assert set(tracks) == {(2, 0)} and len(tracks[2, 0]) == len(worker.track.kind)
    figures = json.loads((tmp_path / FIGURES).read_text())
    backward = figures["workers"]["1"]["phases"]["backward"]
    assert backward["us_per_step"] == pytest.approx(6.0)
    assert figures["timeline_every"] == worker.track.every > 1
    assert figures["measuring_share"] == pytest.approx(2 * 60 / 7000, abs=1e-3)
    assert any("one step in" in line for line in shown(report, 80, tmp_path))


@pytest.mark.parametrize("in_worker", [False, True])
def test_a_step_is_held_against_one_with_nobody_to_exchange_with(in_worker: bool) -> None:
    """Its update is that of the server, or, where workers step themselves, their own."""
    worker, server = Worker(), Worker()
    for number in range(10):
        worker.track.next_step(number + 1)
        worker.span("backward", Phase.BACKWARD, 3000)
        worker.span("wait", Phase.WAIT, 9000)
        if in_worker:
            worker.span("own step", Phase.UPDATE, 500)
        worker.clock.now += 1000
        server.span("push", Phase.SERVE, 700)
        if number % 2:
            server.span("update", Phase.UPDATE, 2000)
    report = Report({0: worker.track}, (server.track,), 1, cost_ns=60.0)
    own = 4500 if in_worker else 4000
    assert report.step_s == pytest.approx((own + 9000) / 1e9, rel=0.01)
    assert report.floor_s == pytest.approx((own + (0 if in_worker else 2000)) / 1e9, rel=0.03)
    assert report.figures()["floor_us_per_step"] == pytest.approx(1e6 * report.floor_s, abs=0.01)
    assert any("would be left with nobody" in line for line in shown(report, 80, Path("there")))
