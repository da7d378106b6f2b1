"""Who comes back, who is asked, who saves: the table of lives, and schedules at random."""

from __future__ import annotations

import random

import pytest

from hybridtrain.engine.recovery.failure_policy import (
    End,
    GoOn,
    Judge,
    OnFailure,
    Replace,
    WorkerGone,
)
from hybridtrain.engine.recovery.roster import (
    AWAY,
    TABLE,
    THERE,
    Ask,
    BreakOff,
    GiveUp,
    Kill,
    LifecycleEvent,
    PermitSave,
    Roster,
    Say,
    Start,
    WorkerState,
)
from hybridtrain.engine.worlds.worker_exit import WorkerDied
from tests.support.schedules import Schedule

S, E = WorkerState, LifecycleEvent
LOST = RuntimeError("killed")


def roster(n: int = 3, **chosen: object) -> Roster:
    options = {"max_restarts": None} | chosen
    made = Roster(n, Judge(OnFailure("restart", **options)), grace_s=30.0)  # type: ignore[arg-type]
    for worker in range(n):
        made.on(worker, E.WAITS)
        made.on(worker, E.GOES_ON)
    return made


def lose(made: Roster, *workers: int, at_s: float = 0.0) -> None:
    for worker in workers:
        assert isinstance(made.failed(worker, LOST, at_s, training=True), Replace)
        made.reaped(worker)


def test_every_state_can_be_reached_and_left_until_there_is_nobody() -> None:
    for start in WorkerState:
        seen, border = {start}, [start]
        while border:
            state = border.pop()
            after = {then for (before, _), then in TABLE.items() if before is state} - seen
            seen |= after
            border += after
        assert S.GONE in seen
        assert start is not S.STARTING or seen == set(WorkerState)
    assert {event for _, event in TABLE} == set(LifecycleEvent)
    assert {then for (_, event), then in TABLE.items() if event is E.DIES} == {S.GONE}
    for state in AWAY:  # nothing that a lost process has still said brings its worker back
        assert not {e for (s, e) in TABLE if s is state} & {E.WAITS, E.MEETS, E.GOES_ON}


def test_one_worker_is_asked_about_several_lost_ones_and_each_answer_counts_once() -> None:
    made = roster()
    lose(made, 0, 1)
    assert made.advance(0.4) == [], "they are given time"
    assert made.advance(0.6) == [Ask(2, 0, 1), Ask(2, 1, 2)]
    assert made.advance(0.7) == [], "once"
    assert made.progress(2, 0, 1, b"x") == [Start(0, b"x")]
    made.started(0)
    assert made.progress(2, 0, 1, b"again") == []
    assert made.progress(2, 1, 1, b"of another question") == []
    assert made.progress(2, 1, 2, b"y") == [Start(1, b"y")]


def test_a_worker_in_a_step_is_asked_about_a_lost_one_and_none_in_a_meeting() -> None:
    made = roster()
    made.on(0, E.MEETS)
    made.on(2, E.WAITS)
    lose(made, 1)
    assert made.advance(1.0) == [Ask(2, 1, 1)]
    made.on(2, E.MEETS)
    assert made.advance(1.0) == [], "nobody can answer"
    made.on(0, E.GOES_ON)
    assert made.advance(1.0) == [Ask(0, 1, 2)]
    assert made.progress(2, 1, 1, b"late") == []
    lose(made, 0, at_s=1.0)
    made.on(2, E.GOES_ON)
    assert made.advance(1.6) == [Ask(2, 0, 3), Ask(2, 1, 4)], "who was asked is lost"


def test_no_worker_is_asked_about_a_lost_one_before_its_process_has_ended() -> None:
    made = roster()
    made.failed(1, LOST, 0.0, training=True)
    assert made.advance(1.0) == []
    made.reaped(1)
    assert made.advance(1.0) == [Ask(0, 1, 1)]


def test_a_run_that_is_stopped_does_not_wait_for_what_only_the_first_worker_would_do() -> None:
    made = roster(2)
    made.progress(1, None, 0, b"kept")
    made.finished(1, first=False)
    made.reaped(1)
    lose(made, 0)
    assert made.away and not made.over
    made.stop(1.0)
    assert made.over


def test_one_process_more_to_save_is_tried_once() -> None:
    made = roster(1)
    made.progress(0, None, 0, b"kept")
    lose(made, 0)
    made.stop(0.0)
    assert made.advance(0.1) == [Start(0, b"kept")]
    assert made.refused(0, BlockingIOError("no room"), 0.2) == []
    assert made.over


def test_after_a_while_a_worker_comes_back_as_soon_as_at_first() -> None:
    judge, left = Judge(OnFailure("restart", max_restarts=None)), WorkerGone(2)
    verdicts = [judge.failed(0, LOST, left, at_s) for at_s in (0.0, 10.0, 20.0, 400.0)]
    assert verdicts == [Replace(0.5, 1), Replace(1.0, 2), Replace(2.0, 3), Replace(0.5, 4)]


def test_workers_that_are_lost_with_their_host_count_as_one() -> None:
    judge, left = Judge(OnFailure("restart", max_restarts=1)), WorkerGone(1)
    assert judge.failed(0, WorkerDied("host 1 is lost"), left, 0.0) == Replace(0.5, 1)
    for worker in (1, 2):
        error = WorkerDied("host 1 is lost", counts=False)
        assert judge.failed(worker, error, left, 0.0) == Replace(0.5, 1)
    assert isinstance(judge.failed(0, WorkerDied("killed"), left, 1.0), End)


@pytest.mark.parametrize(("left", "least"), [(1, 2), (2, 3)])
def test_a_merge_rule_that_needs_more_workers_ends_the_run(left: int, least: int) -> None:
    judge = Judge(OnFailure("continue", merges=least))
    verdict = judge.failed(0, LOST, WorkerGone(left), 0.0)
    assert isinstance(verdict, End) and f"the merge rule needs {least}" in verdict.reason
    assert judge.failed(0, LOST, WorkerGone(least), 0.0) == GoOn()


def test_what_a_lost_worker_has_pushed_is_waited_for() -> None:
    made = roster()
    lose(made, 1)
    assert made.advance(1.0, pushed={1}) == []
    assert made.advance(1.0, pushed={2}) == [Ask(0, 1, 1)]


def test_if_all_are_lost_one_begins_where_training_was_and_answers() -> None:
    made = roster()
    made.progress(0, None, 0, b"kept")
    lose(made, 0, 1, 2)
    assert made.advance(1.0, pushed={0}) == [Start(1, b"kept")]
    made.started(1)
    assert made.advance(1.1) == []
    made.on(1, E.WAITS)
    assert made.advance(1.2) == [Ask(1, 0, 1), Ask(1, 2, 2)]


def test_who_has_come_back_answers_as_it_waits_for_the_mean_of_all() -> None:
    made = roster(2)
    made.progress(0, None, 0, b"kept")
    lose(made, 0, 1)
    assert made.advance(1.0) == [Start(0, b"kept")]
    made.started(0)
    made.on(0, E.WAITS)  # for worker 1, too
    assert made.advance(1.1) == [Ask(0, 1, 1)]


def test_a_question_to_a_worker_that_is_lost_goes_to_its_successor_anew() -> None:
    made = roster(2)
    made.progress(0, None, 0, b"kept")
    lose(made, 0)
    assert made.advance(1.0) == [Ask(1, 0, 1)]
    lose(made, 1, at_s=1.0)
    assert made.advance(1.0) == [Start(0, b"kept")]
    made.refused(0, OSError("no process"), 1.0)
    assert made.advance(1.5) == [Start(0, b"kept")]
    made.refused(0, OSError("no process"), 1.5)
    assert made.advance(1.6) == [Start(1, b"kept")]
    made.started(1)
    made.on(1, E.WAITS)
    assert made.advance(3.0) == [Ask(1, 0, 2)]


def test_if_nobody_is_left_who_knows_the_run_ends_and_says_so() -> None:
    made = roster(2)
    made.progress(0, None, 0, b"")  # it cannot be told
    lose(made, 0)
    verdict = made.failed(1, LOST, 0.0, training=True)
    assert isinstance(verdict, End) and "nobody is left" in verdict.reason


def test_if_nobody_has_told_yet_all_begin_anew() -> None:
    made = roster(2)
    lose(made, 0)
    assert made.failed(1, LOST, 0.0, training=True) == Replace(0.5, 2, anew=True)
    made = roster(2)
    made.finished(0)
    verdict = made.failed(1, LOST, 0.0, training=True)
    assert isinstance(verdict, End), "training is over"


def test_before_training_there_is_nothing_to_go_on_from() -> None:
    made = Roster(2, Judge(OnFailure("restart")))
    verdict = made.failed(1, LOST, 0.0, training=False)
    assert isinstance(verdict, End) and "training had not begun" in verdict.reason


def test_who_raises_a_keyboard_interrupt_wants_the_end_not_a_restart() -> None:
    verdict = roster().failed(1, KeyboardInterrupt(), 0.0, training=True)
    assert verdict == End()


def test_a_restart_that_training_does_not_wait_for_is_called_off_aloud() -> None:
    made = roster()
    lose(made, 1)
    made.finished(0)
    made.finished(2)
    assert made.advance(0.1) == [Say("worker 1 is not restarted: training is over")]
    made.reaped(0)
    made.reaped(2)
    assert made.over


def test_a_process_that_cannot_be_started_is_tried_again_but_not_for_ever() -> None:
    made, now_s = roster(2), 1.0
    lose(made, 1)
    refusal = BlockingIOError(11, "Resource temporarily unavailable")
    for number in range(1, 7):
        assert made.advance(now_s) == [Ask(0, 1, number)]
        assert made.progress(0, 1, number, b"x") == [Start(1, b"x")]
        (act,) = made.refused(1, refusal, now_s)
        now_s += 0.5 * 2 ** (number - 1)
        assert number == 6 or made.advance(now_s - 0.1) == []
    assert isinstance(act, GiveUp) and "6 times" in act.reason and "temporarily" in act.reason


@pytest.mark.parametrize("state", [S.FAILED, S.CALLED])
def test_when_the_run_ends_nobody_waits_for_who_is_away(state: WorkerState) -> None:
    made = roster()
    lose(made, 1)
    if state is S.CALLED:
        made.advance(1.0)
    assert made.states[1] is state
    assert made.stop(1.0) == [1]
    assert made.progress(0, 1, 1, b"late") == []
    assert made.states[1] is S.GONE
    assert isinstance(made.failed(0, LOST, 1.0, training=True), End)


def ending(made: Roster) -> Roster:
    made.stop(0.0)
    return made


def test_the_first_worker_saves_and_the_others_may_leave_when_it_has_written() -> None:
    made = ending(roster())
    made.stopped(1)
    made.stopped(0)
    assert made.advance(0.1) == [], "all are waited for"
    made.stopped(2)
    assert made.advance(0.2) == [PermitSave(0, True)]
    assert made.advance(0.3) == [], "one at a time"
    made.saved(0, True)
    assert made.advance(0.4) == [PermitSave(1, False), PermitSave(2, False)]


def test_saving_waits_for_a_worker_that_does_not_stop_until_half_of_the_time_is_over() -> None:
    made = ending(roster())
    made.stopped(0)
    made.stopped(1)
    assert made.advance(14.9) == []
    assert PermitSave(0, True) in made.advance(15.1)
    made.saved(0, True)
    made.stopped(2)
    assert PermitSave(2, False) in made.advance(15.2)


def test_the_next_worker_saves_if_the_first_cannot_or_is_lost() -> None:
    made = ending(roster())
    for worker in range(3):
        made.stopped(worker)
    assert made.advance(0.1) == [PermitSave(0, True)]
    made.saved(0, False)
    assert made.advance(0.2) == [PermitSave(1, True)]
    made.reaped(1)
    assert made.advance(0.3) == [PermitSave(2, True)]
    made.saved(2, False)
    assert made.advance(0.4) == [], "nobody is left"


def test_a_worker_that_has_stopped_saves_in_time_though_the_others_do_not_stop() -> None:
    made = ending(roster())
    made.stopped(2)
    assert made.advance(14.0) == []
    assert made.advance(15.0)[1:] == [PermitSave(2, True)]


def test_saving_waits_for_free_running_workers_that_may_still_make_an_update() -> None:
    made = roster()
    made.whole_rounds = False
    ending(made)
    made.stopped(0)
    assert made.advance(0.1) == []
    made.stopped(2)
    assert made.advance(0.2) == []
    made.reaped(1)
    assert made.advance(0.3) == [PermitSave(0, True)]
    late = roster()
    late.whole_rounds = False
    ending(late).stopped(0)
    assert late.advance(15.0) == [BreakOff(), PermitSave(0, True)], "nobody makes one behind it"


def test_saving_neither_waits_for_nor_needs_a_worker_that_has_just_come_back() -> None:
    made = roster()
    lose(made, 0)
    made.advance(1.0)
    made.progress(1, 0, 1, b"x")
    made.started(0)
    assert made.stop(2.0) == [0]
    made.stopped(1)
    made.stopped(2)
    assert made.advance(2.1) == [PermitSave(1, True)]
    made.saved(1, True)
    assert made.advance(2.2) == [PermitSave(2, False), Kill(0)]


def test_a_worker_that_fails_saves_only_if_the_run_ends() -> None:
    made = roster()
    made.failed(1, LOST, 0.0, training=True, waits=True)
    assert made.states[1] is S.FAILED
    made = ending(roster())
    made.failed(1, LOST, 0.0, training=True, waits=True)
    assert made.states[1] is S.STOPPED


def test_if_nobody_is_left_one_process_more_is_started_to_save() -> None:
    made = roster(2)
    made.progress(0, None, 0, b"kept")
    lose(made, 0, 1)
    assert sorted(made.stop(0.1)) == [0, 1]
    assert made.advance(0.2) == [Start(0, b"kept")]
    made.started(0)
    made.stopped(0)
    assert made.advance(0.3) == [PermitSave(0, True)]
    made.reaped(0)
    assert made.advance(0.4) == [] and made.over, "once"


def test_every_worker_state_is_one_of_there_away_or_at_an_end() -> None:
    rest = {S.STOPPED, S.SAVING, S.ENDED, S.GONE}
    assert {*THERE} | {*AWAY} | rest == set(WorkerState)


@pytest.mark.wide
def test_whatever_happens_in_7_000_schedules_restarts_happen_or_the_run_says_why() -> None:
    for seed in range(7_000):
        Schedule(random.Random(seed)).run()


@pytest.mark.sampled(2)
@pytest.mark.slow  # about five minutes on one busy core
@pytest.mark.parametrize("part", range(5))
def test_whatever_happens_in_half_a_million_schedules(part: int) -> None:
    for seed in range(part * 100_000, (part + 1) * 100_000):
        Schedule(random.Random(seed)).run()
