"""One line, after a minute without a first mini-batch, that says where workers are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from hybridtrain.engine.monitoring.hang_detector import Doing, HangTimeout
from hybridtrain.engine.monitoring.watchdog import LateStart, Watchdog

NOBODY = 99_999_999  # more than there are processes
STACKS = """\
Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 5 in run

Thread 0x00007f02 (most recent call first):
  File "{stdlib}/threading.py", line 327 in wait
  File "{stdlib}/concurrent/futures/_base.py", line 451 in result
  File "/home/me/data.py", line {line} in __getitem__
  File "/home/me/train.py", line 3 in main
  File "{ours}/worlds/local/worker_main.py", line 177 in _outcome
"""


@dataclass
class Beats:
    """A heartbeat page, and stacks that are written ``later`` looks after they were asked for."""

    doing: Doing = Doing.EPOCH
    counts: dict[Doing, int] = field(default_factory=dict)
    text: str = ""
    later: int = 0
    beats: int = 0
    waits: bool = False
    forgotten: int = 0

    @property
    def where(self) -> str:
        return str(self.doing)

    def begun(self, doing: Doing) -> int:
        return self.counts.get(doing, 0)

    def forget_stacks(self) -> None:
        self.forgotten += 1

    def stacks(self) -> str:
        self.later -= 1
        return self.text if self.later < 0 else ""


@dataclass
class Watched:
    number: int
    heartbeat: Any = field(default_factory=Beats)
    asked: str = ""
    pid: int = 0
    heard: int = 0

    def kill(self, cause: str) -> None:
        raise AssertionError(cause)


def stacks(line: int = 7) -> str:
    from hybridtrain.engine.monitoring import watchdog

    stdlib, ours = watchdog._NOT_USERS
    return STACKS.format(stdlib=stdlib, ours=ours, line=line)


def told(
    workers: list[Watched], seconds: float = 200.0, step: float = 1.0, change: Any = None
) -> list[tuple[float, str]]:
    """What was said, and when."""
    said: list[tuple[float, str]] = []
    now_s = 0.0
    late = LateStart(lambda text: said.append((now_s, text)), lambda pid: True)
    while now_s < seconds:
        if change is not None:
            change(now_s)
        late.look(now_s, workers)
        now_s += step
    return said


def test_workers_without_a_first_mini_batch_after_a_minute_are_named_once_with_calls() -> None:
    workers = [Watched(number, Beats(text=stacks())) for number in range(3)]
    ((when_s, text),) = told(workers)
    assert 60 <= when_s <= 64
    assert text == (
        "no worker has finished its first mini-batch after 62 s: workers 0, 1, 2 (at the beginning "
        "or end of an epoch or of a validation) in wait (threading.py:327), called by __getitem__ "
        "(data.py:7)"
    )


def test_workers_elsewhere_are_named_apart_and_a_reply_that_one_waits_for() -> None:
    workers = [
        Watched(0, Beats(text=stacks(7))),
        Watched(1, Beats(text=stacks(9))),
        Watched(2, Beats(Doing.STARTING), asked="all to begin"),
        Watched(3, Beats(Doing.STARTING)),
    ]
    ((_, text),) = told(workers)
    assert "worker 0 (" in text and "(data.py:7); worker 1 (" in text and "(data.py:9); " in text
    assert "worker 2 (starting up) waits for all to begin; " in text
    assert text.endswith("worker 3 (starting up) has not said where")


def test_a_late_start_in_many_places_names_some_of_the_places() -> None:
    ((_, text),) = told([Watched(n, Beats(text=stacks(n))) for n in range(9)])
    assert text.count("data.py") == 4 and text.endswith("; …")


@pytest.mark.parametrize(
    "counts",
    [{Doing.STEP: 1}, {Doing.EVALUATION: 1}, {Doing.EPOCH: 1, Doing.BETWEEN: 1}],
)
def test_no_late_start_is_reported_once_any_worker_has_finished_a_mini_batch(
    counts: dict[Doing, int],
) -> None:
    workers = [Watched(0), Watched(1)]

    def change(now_s: float) -> None:
        if now_s > 30:
            workers[1].heartbeat.counts = counts

    assert told(workers, change=change) == []
    assert workers[0].heartbeat.forgotten == 0


def test_a_first_step_that_is_under_way_is_not_finished() -> None:
    beats = Beats(Doing.STEP, {Doing.STEP: 1}, stacks())
    ((_, text),) = told([Watched(0, beats)])
    assert "worker 0 (in a training step) in wait" in text


def test_a_pause_of_the_watching_process_does_not_count() -> None:
    assert told([Watched(0)], seconds=3000, step=100) == []


def test_nothing_is_said_of_a_run_whose_workers_have_ended() -> None:
    assert told([]) == []


@pytest.mark.parametrize("later", [0, 1, 5])
def test_stacks_are_waited_for_until_they_are_whole(later: int) -> None:
    ((_, text),) = told([Watched(0, Beats(text=stacks(), later=later))], step=0.1)
    assert "data.py:7" in text


def watched_by(
    patience: HangTimeout | None, change: Callable[[float], None] | None = None
) -> list[str]:
    """What a watchdog says in 100 s of a worker that does nothing."""
    said: list[str] = []
    watchdog, now_s = Watchdog(patience, said.append), 0.0
    workers = [Watched(0, Beats(text=stacks()), pid=NOBODY)]
    while now_s < 100:
        watchdog.look(now_s, workers)
        now_s = max(watchdog.due_s, now_s + 0.05)
    return said


def test_a_watchdog_reports_a_late_start_also_where_no_worker_is_ever_given_up() -> None:
    (text,) = watched_by(None)
    assert text.startswith("no worker has finished its first mini-batch after 60 s")


def test_a_worker_that_was_named_as_one_that_hangs_is_not_named_again() -> None:
    (text,) = watched_by(HangTimeout(10.0))
    assert text.startswith(
        "worker 0 (process 99999999) may hang: it has shown no sign of life for 50 s"
    )
