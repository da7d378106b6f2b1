"""Who hangs: decided from scripted signs of life and a scripted clock, without processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hybridtrain import HybridStrategy
from hybridtrain.engine.monitoring import hang_detector
from hybridtrain.engine.monitoring.hang_detector import (
    Doing,
    HangDetector,
    HangTimeout,
    Heartbeat,
    Sign,
    Silent,
    Standstill,
)
from hybridtrain.errors import UserError


class Life:
    """One worker, looked at every second."""

    def __init__(self, patience: HangTimeout) -> None:
        self.looks = HangDetector(patience)
        self.now_s = 0.0
        self.pid = 1
        self.heartbeat = Heartbeat()

    def does(self, doing: Doing, seconds: float, waits: bool = False) -> list[Silent]:
        """One stretch; returns what was said of it."""
        self.heartbeat.beat(doing)
        return self.goes_on(seconds, waits)

    def goes_on(self, seconds: float, waits: bool = False) -> list[Silent]:
        """In the same stretch."""
        found: list[Silent] = []
        ends_s = self.now_s + seconds
        while self.now_s < ends_s:
            sign = Sign.of(self.pid, waits, 0, self.heartbeat)
            found += self.looks.look(self.now_s, {1: sign})
            self.now_s += 1.0
        return found

    def trains(self, n: int = 5, seconds: float = 3.0) -> None:
        for _ in range(n):
            assert not self.does(Doing.STEP, seconds)
            assert not self.does(Doing.BETWEEN, seconds)


def hung_after_s(found: list[Silent]) -> float | None:
    return next((each.for_s for each in found if each.hung), None)


def test_a_long_first_step_is_no_hang_and_the_same_later_is() -> None:
    life = Life(HangTimeout())
    assert hung_after_s(life.does(Doing.STARTING, 1000)) is None
    assert hung_after_s(life.does(Doing.STEP, 1500)) is None
    life.trains()
    assert hung_after_s(life.does(Doing.STEP, 1500)) == 300


@pytest.mark.parametrize("doing", [Doing.EVALUATION, Doing.CHECKPOINT, Doing.EPOCH])
def test_a_long_first_validation_checkpoint_or_end_of_an_epoch_is_no_hang(doing: Doing) -> None:
    life = Life(HangTimeout())
    life.trains()
    assert hung_after_s(life.does(doing, 1700)) is None


@pytest.mark.parametrize("doing", [Doing.BETWEEN, Doing.CHECKPOINT, Doing.EPOCH])
def test_what_users_do_beside_computing_may_take_as_long_as_a_process_group_waits(
    doing: Doing,
) -> None:
    life = Life(HangTimeout())
    life.trains()
    life.does(doing, 10)
    life.trains()
    assert hung_after_s(life.does(doing, 3000)) == 1800


def test_a_worker_with_long_steps_is_given_a_multiple_of_its_longest() -> None:
    life = Life(HangTimeout())
    life.trains(seconds=60.0)
    past_s = 59.0  # looks see it no better than to a second
    assert hung_after_s(life.does(Doing.STEP, 2000)) == pytest.approx(20 * past_s, abs=41)


def test_the_first_step_does_not_teach_how_long_a_step_is() -> None:
    life = Life(HangTimeout())
    life.does(Doing.STEP, 900)
    life.trains()
    assert hung_after_s(life.does(Doing.STEP, 900)) == 300


def test_a_given_time_holds_for_everything_once_a_step_is_over() -> None:
    for doing in Doing:
        life = Life(HangTimeout(8.0))
        life.trains(seconds=3.0)
        life.does(doing, 3.0)
        assert hung_after_s(life.does(doing, 30)) == 8


def test_what_is_done_for_the_first_time_may_take_some_seconds_whatever_was_given() -> None:
    life = Life(HangTimeout(2.0))
    life.does(Doing.STEP, 1)
    life.does(Doing.STEP, 1)
    assert hung_after_s(life.does(Doing.CHECKPOINT, 30)) == 10
    assert hung_after_s(life.does(Doing.CHECKPOINT, 30)) == 2


def test_a_given_time_is_stretched_for_what_comes_before_the_end_of_the_first_step() -> None:
    life = Life(HangTimeout(8.0))
    assert hung_after_s(life.does(Doing.STARTING, 79)) is None
    assert hung_after_s(life.does(Doing.STEP, 200)) == 80


def test_who_waits_never_hangs() -> None:
    life = Life(HangTimeout(8.0))
    life.trains()
    assert life.does(Doing.STEP, 10_000, waits=True) == []
    assert hung_after_s(life.goes_on(30)) == 8, "from when it was answered"


def test_a_silent_worker_is_named_once_before_it_is_given_up() -> None:
    life = Life(HangTimeout(20.0))
    life.trains()
    found = life.does(Doing.STEP, 19.5)
    assert [(each.for_s, each.hung) for each in found] == [(10.0, False)]
    assert (found[0].worker, found[0].doing, found[0].limit_s) == (1, Doing.STEP, 20.0)


def test_steps_between_two_looks_count() -> None:
    life = Life(HangTimeout(8.0))
    life.does(Doing.STARTING, 3)
    for _ in range(5):
        life.heartbeat.beat(Doing.STEP)
        life.heartbeat.beat(Doing.BETWEEN)
    assert hung_after_s(life.does(Doing.STEP, 30)) == 8


def test_who_is_awaited_is_named_after_a_minute_and_who_is_not_after_half_of_its_time() -> None:
    for others_wait, early_s in ((True, 60.0), (False, 900.0)):
        looks = HangDetector(HangTimeout())
        found: list[Silent] = []
        for now in range(1000):
            other = Sign(2, others_wait, Doing.EPOCH, 0 if others_wait else now)
            found += looks.look(float(now), {1: Sign(1, False, Doing.CHECKPOINT, 0), 2: other})
        assert [(each.worker, each.for_s, each.hung) for each in found] == [(1, early_s, False)]


def test_a_worker_whose_checkpoints_always_take_long_is_named_only_once() -> None:
    looks, said, now = HangDetector(HangTimeout()), [], 0.0
    for beats in range(4):
        for _ in range(80):
            signs = {1: Sign(1, False, Doing.CHECKPOINT, beats), 2: Sign(2, True, Doing.EPOCH, 0)}
            said += [beats for _ in looks.look(now, signs)]
            now += 1.0
    assert said == [0]


def test_an_excuse_begins_the_stretch_anew_and_silently() -> None:
    life = Life(HangTimeout(20.0))
    life.trains()
    assert len(life.does(Doing.STEP, 15)) == 1
    life.looks.excuse(1)
    assert life.goes_on(19) == []


def test_waiting_for_a_core_is_not_hanging() -> None:
    looks = HangDetector(HangTimeout(8.0))
    found: list[Silent] = []
    for now in range(40):
        found += looks.look(float(now), signs({1: 0, 2: 0}, set()), {1: 0.9})
    assert hung_after_s([each for each in found if each.worker == 2]) == 8
    assert not [each for each in found if each.worker == 1 and each.hung]


def test_a_pause_of_the_watching_process_is_nobodys_fault() -> None:
    life = Life(HangTimeout(20.0))
    life.trains()
    life.does(Doing.STEP, 5)
    life.now_s += 3600  # Ctrl-Z, and fg an hour later
    assert life.goes_on(4) == []


def test_a_new_process_in_a_workers_place_has_no_past() -> None:
    life = Life(HangTimeout(8.0))
    life.trains()
    life.pid, life.heartbeat = 2, Heartbeat()
    assert hung_after_s(life.does(Doing.STEP, 60)) is None


def signs(beats: dict[int, int], waits: set[int]) -> dict[int, Sign]:
    return {w: Sign(w, w in waits, Doing.STEP, n) for w, n in beats.items()}


def test_only_the_worker_that_neither_waits_nor_works_is_given_up() -> None:
    looks = HangDetector(HangTimeout(8.0))
    found: list[Silent] = []
    for now in range(40):
        beats = {0: min(now, 5), 1: min(now, 5), 2: now}
        found += looks.look(float(now), signs(beats, {0} if now >= 5 else set()))
    assert {each.worker for each in found} == {1}


def test_a_worker_that_has_ended_is_forgotten() -> None:
    looks = HangDetector(HangTimeout(8.0))
    for now in range(7):
        looks.look(float(now), signs({0: 0, 1: 0}, set()))
    looks.look(7.0, signs({0: 1}, set()))
    assert looks.look(8.0, signs({0: 2, 1: 0}, set())) == []


@pytest.fixture(params=[0, -1, "soon", True, float("inf"), float("nan"), [3]])
def nonsense(request: pytest.FixtureRequest) -> Iterator[object]:
    yield request.param


def test_what_is_no_time_is_refused(nonsense: object) -> None:
    with pytest.raises(
        UserError, match=r"hang_timeout_s=.* was given; .* from 0.1 on, auto, or null"
    ):
        HybridStrategy(hang_timeout_s=nonsense)


def test_null_waits_for_ever_and_auto_learns() -> None:
    assert HangTimeout.of(None) is None
    assert HangTimeout.of("auto") == HangTimeout()
    assert HangTimeout.of(2) == HangTimeout(2.0)


# ---- deadlock -----------------------------------------------------------------------------------


def seconds_until(
    looks: list[tuple[bool, int]], telling: bool = False, pause_s: float = 1.0
) -> int:
    """Looks, once a ``pause_s``; how many until it stands still, the last one repeated."""
    watch = Standstill()
    for n in range(2000):
        stands, heard = looks[min(n, len(looks) - 1)]
        if watch.look(n * pause_s, stands, heard, telling):
            return n
    return -1


def test_a_run_stands_still_when_all_workers_wait_and_nothing_is_heard_for_long() -> None:
    assert seconds_until([(True, 5)]) == 30
    assert seconds_until([(True, 5)] * 20 + [(True, 6)]) == 20 + 30
    assert seconds_until([(True, 5)] * 20 + [(False, 5), (True, 5)]) == 20 + 30
    assert seconds_until([(False, 5)]) == -1


def test_who_tells_where_training_is_may_take_its_time() -> None:
    assert seconds_until([(True, 5)], telling=True) == 600


def test_a_pause_of_the_watching_process_does_not_count_as_a_standstill() -> None:
    assert seconds_until([(True, 5)], pause_s=1000.0) == 30 / hang_detector._PAUSE_S


@pytest.mark.parametrize("stands", [True, False])
def test_a_first_look_finds_no_standstill(stands: bool) -> None:
    assert not Standstill().look(1e6, stands, 0)
