"""What a run has counted, by a clock that the test turns."""

from __future__ import annotations

from typing import Any

import pytest

from hybridtrain.engine.monitoring.watchdog import Slow, SlowReport, slow_worker
from hybridtrain.engine.protocol.shared_round import MadeRounds
from hybridtrain.engine.server.barrier import Barrier, BarrierMismatch
from hybridtrain.engine.server.run_statistics import RunStatistics


class Clock:
    """Seconds, as the test says."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def statistics(n_workers: int, start_s: float = 0.0) -> tuple[RunStatistics, Clock]:
    clock = Clock(start_s)
    made = RunStatistics(n_workers, clock)
    made.start()
    return made, clock


def a_round(
    made: RunStatistics, clock: Clock, arrivals_s: list[float], weight: float = 4.0
) -> None:
    """Workers push at these times; the last one ends the round."""
    for worker, at_s in enumerate(arrivals_s):
        clock.now_s = at_s
        made.pushed(worker, weight)
    made.updated([made.age(worker) for worker in range(len(arrivals_s))])
    for worker in range(len(arrivals_s)):
        made.released(worker)


@pytest.mark.parametrize("start_s", [0.0, 1000.0])
def test_the_fast_wait_for_the_slow(start_s: float) -> None:
    made, clock = statistics(2, start_s)
    a_round(made, clock, [start_s + 1.0, start_s + 4.0])
    a_round(made, clock, [start_s + 5.0, start_s + 8.0])
    stats = made.stats()
    assert stats["waiting_share"] == [6.0 / 8.0, 0.0]
    assert stats["updates"] == 2
    assert stats["samples"] == 16
    assert stats["samples_per_s"] == 2.0
    assert stats["samples_per_worker"] == [8, 8]
    assert stats["staleness"] == {"mean": 0.0, "max": 0, "histogram": {0: 4}}


@pytest.mark.parametrize("start_s", [0.0, 1000.0])
def test_a_validation_is_neither_computing_nor_training(start_s: float) -> None:
    made, clock = statistics(1, start_s)
    a_round(made, clock, [start_s + 2.0])
    made.pause()
    clock.now_s += 50.0
    made.pause()  # said twice, it is one pause
    clock.now_s += 50.0
    made.resume()
    made.resume()
    a_round(made, clock, [clock.now_s + 2.0])
    stats = made.stats()
    assert stats["training_s"] == 4.0
    assert stats["samples_per_s"] == 2.0
    assert stats["waiting_share"] == [0.0]


def test_waiting_during_a_pause_is_not_counted_either() -> None:
    made, clock = statistics(2)
    clock.now_s = 1.0
    made.pushed(0, 1.0)
    made.pause()
    clock.now_s = 11.0
    made.resume()
    clock.now_s = 12.0
    made.pushed(1, 1.0)
    made.updated([0, 0])
    made.released(0)
    made.released(1)
    assert made.stats()["waiting_share"] == [0.5, 0.0]


def test_staleness_counts_the_updates_between_reading_and_applying() -> None:
    made, _ = statistics(3)
    for worker in (0, 0, 1, 2):  # 0 reads 0, then 1; 1 and 2 read 0
        made.pushed(worker, 1.0)
        made.updated([made.age(worker)])
        made.released(worker)
    assert made.stats()["staleness"] == {
        "mean": (0 + 0 + 2 + 3) / 4,
        "max": 3,
        "histogram": {0: 2, 2: 1, 3: 1},
    }


def test_reading_the_parameters_otherwise_makes_them_fresh() -> None:
    made, _ = statistics(2)
    made.pushed(0, 1.0)
    made.updated([made.age(0)])
    made.released(0)
    made.read(1)
    made.pushed(1, 1.0)
    made.updated([made.age(1)])
    assert made.stats()["staleness"]["max"] == 0


def test_a_resumed_run_goes_on_counting_versions_and_counts_its_own_updates() -> None:
    clock = Clock()
    made = RunStatistics(1, clock)
    made.start(version=100)
    made.read(0)
    a_round(made, clock, [1.0])
    assert made.version == 101
    assert made.stats()["updates"] == 1
    assert made.stats()["staleness"]["max"] == 0


def test_before_anything_has_happened_all_is_zero() -> None:
    stats: dict[str, Any] = RunStatistics(2, Clock()).stats()
    assert stats["updates"] == stats["samples"] == stats["samples_per_s"] == 0
    assert stats["waiting_share"] == [0.0, 0.0]
    assert stats["workers"] == 2


# ---- meetings -----------------------------------------------------------------------------------


def test_a_meeting_ends_with_the_last_and_answers_in_the_order_of_numbers() -> None:
    meeting: Barrier[str] = Barrier({0, 1, 2})
    meeting.bring(2, "t", "c")
    meeting.bring(0, "t", "a")
    assert meeting.close() is None
    assert meeting.waiting == {0, 2}
    meeting.bring(1, "t", "b")
    assert list((meeting.close() or {}).items()) == [(0, "a"), (1, "b"), (2, "c")]
    assert meeting.close() is None, "and the next one is empty"


def test_waiting_in_different_places_is_named_with_both() -> None:
    meeting: Barrier[int] = Barrier({0, 1})
    meeting.bring(1, "barrier", 0)
    with pytest.raises(BarrierMismatch, match=r"worker 0 waits in 'metric'.* 1 waits in 'barrier'"):
        meeting.bring(0, "metric", 0)


def test_who_leaves_is_not_waited_for_and_takes_along_what_it_brought() -> None:
    meeting: Barrier[int] = Barrier({0, 1, 2})
    meeting.bring(1, "t", 11)
    meeting.bring(0, "t", 10)
    meeting.leave(1)
    assert meeting.close() is None
    meeting.leave(2)
    assert meeting.close() == {0: 10}


def test_a_worker_that_waits_patiently_does_not_hold_up_the_others() -> None:
    meeting: Barrier[str] = Barrier({0, 1, 2})
    meeting.bring(2, "end", "rests", patient=True)
    meeting.bring(0, "metric", "a")
    assert meeting.close() is None
    meeting.bring(1, "metric", "b")
    assert meeting.close() == {0: "a", 1: "b"}
    assert meeting.waiting == {2}
    meeting.bring(0, "end", "a", patient=True)
    assert meeting.close() is None
    meeting.bring(1, "end", "b", patient=True)
    assert meeting.close() == {0: "a", 1: "b", 2: "rests"}
    assert not meeting.waiting


def test_the_patient_are_waited_for_until_they_have_come_to_their_place() -> None:
    meeting: Barrier[int] = Barrier({0, 1})
    meeting.bring(0, "barrier", 0)
    assert meeting.close() is None, "worker 1 may still be training"
    meeting.bring(1, "end", 1, patient=True)
    assert meeting.close() == {0: 0}


def test_all_wait_patiently_in_two_places_and_nobody_is_let_go_too_early() -> None:
    meeting: Barrier[int] = Barrier({0, 1})
    meeting.bring(0, "here", 0, patient=True)
    meeting.bring(1, "there", 1, patient=True)
    assert meeting.close() is None
    meeting.leave(1)
    assert meeting.close() == {0: 0}


# ---- who is slow --------------------------------------------------------------------------------


def test_waiting_is_laid_to_whoever_came_last() -> None:
    made, clock = statistics(3)
    a_round(made, clock, [1.0, 2.0, 4.0])
    a_round(made, clock, [5.0, 6.0, 8.0])
    stats = made.stats()
    assert stats["awaited_share"] == [0.0, 0.0, 1.0]
    assert stats["step_s"] == [1.0, 2.0, 4.0]
    slow = slow_worker(stats, stats["training_s"])
    assert slow_worker(stats, 4.0) is None, "so short a run says nothing"
    assert slow == Slow(2, 4.0 / 1.5, 1.0, (6.0 / 8.0 + 4.0 / 8.0) / 2)
    assert str(slow) == (
        "worker 2 is slow: a mini-batch takes it 2.7 times as long as the others, who wait 62 % of "
        "their time; 100 % of all waiting is for it"
    )


def test_who_has_waited_before_it_pushes_has_not_come_last() -> None:
    made, clock = statistics(2)
    clock.now_s = 8.0
    made.pushed(0, 4.0)
    made.pushed(1, 4.0, waited_s=6.0)
    made.updated([0, 0])
    for worker in (0, 1):
        made.released(worker)
    stats = made.stats()
    assert stats["waiting_share"] == [0.0, 6.0 / 8.0]
    assert stats["awaited_share"] == [1.0, 0.0]


def test_no_worker_has_waited_since_before_its_last_release() -> None:
    made, clock = statistics(1)
    clock.now_s = 2.0
    made.pushed(0, 4.0, waited_s=3.0)  # by another clock
    made.released(0)
    assert made.stats()["step_s"] == [0.0] and made.stats()["waiting_share"] == [1.0]


def test_what_workers_have_made_together_they_have_read() -> None:
    made, clock = statistics(2)
    clock.now_s = 3.0
    made.made_together(MadeRounds(3, 3.0, [12.0, 6.0], [0.0, 1.5], [1.5, 0.0]))
    assert [made.age(worker) for worker in (0, 1)] == [0, 0]
    stats = made.stats()
    assert (stats["updates"], stats["samples"], stats["samples_per_s"]) == (3, 18, 6.0)
    assert stats["waiting_share"] == [0.0, 0.5] and stats["awaited_share"] == [1.0, 0.0]
    assert stats["staleness"] == {"mean": 0.0, "max": 0, "histogram": {0: 6}}


def test_nobody_is_ahead_of_a_worker_that_is_gone() -> None:
    made, _ = statistics(2)
    for worker in (0, 1):
        made.clocks.join(worker)
    for worker in (0, 0):
        made.pushed(worker, 4.0)
    assert made.stats()["lead"] == {"now": [2, 0], "max": [2, 0]}
    made.left(1)
    assert made.stats()["lead"] == {"now": [0, 0], "max": [2, 0]}


def test_workers_that_take_turns_in_being_last_are_not_called_slow() -> None:
    made, clock = statistics(2)
    for n in range(10):
        early, late = 10.0 * n + 1.0, 10.0 * n + 10.0
        clock.now_s = early
        made.pushed(n % 2, 4.0)
        clock.now_s = late
        made.pushed(1 - n % 2, 4.0)
        made.updated([0, 0])
        made.released(0)
        made.released(1)
    assert made.stats()["awaited_share"] == [0.5, 0.5]
    assert slow_worker(made.stats(), 100.0) is None


def test_a_slow_worker_that_nobody_waits_for_costs_nothing() -> None:
    made, clock = statistics(2)
    for n in range(1, 31):
        clock.now_s = float(n)
        for worker in [0, 1] if n % 3 == 0 else [0]:
            made.pushed(worker, 4.0)
            made.updated([0])
            made.released(worker)
    assert made.stats()["step_s"] == [1.0, 3.0]
    assert slow_worker(made.stats(), 100.0) is None


def test_a_slow_worker_is_reported_once_not_too_early_and_at_the_end_at_the_latest() -> None:
    said: list[str] = []
    made, clock = statistics(2)
    report = SlowReport(made.stats, said.append)
    a_round(made, clock, [2.0, 8.0])
    report.look()
    assert said == [], "8 s are not enough to say so in mid-run"
    report.conclude()
    assert len(said) == 1 and said[0].startswith(
        "worker 1 is slow: a mini-batch takes it 4.0 times"
    )
    for n in range(3, 20):
        a_round(made, clock, [4.0 * n + 1.0, 4.0 * n + 4.0])
        report.look()
    report.conclude()
    assert len(said) == 1


def test_a_slow_worker_is_reported_in_mid_run() -> None:
    said: list[str] = []
    made, clock = statistics(2)
    report = SlowReport(made.stats, said.append)
    for n in range(10):
        a_round(made, clock, [4.0 * n + 1.0, 4.0 * n + 4.0])
        report.look()
    assert len(said) == 1 and "batch_size_per_worker" in said[0]
