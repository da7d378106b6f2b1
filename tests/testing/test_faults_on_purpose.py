"""Faults on purpose: what a user may write, and when they are due."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from hybridtrain.engine.faults import (
    KINDS,
    PHASES,
    Fault,
    FaultLog,
    Schedule,
    check_workers,
    happened,
    read_faults,
)
from hybridtrain.errors import UserError


def test_a_fault_is_a_line_of_configuration() -> None:
    (fault,) = read_faults([{"worker": 1, "step": 20, "kind": "kill"}])
    assert fault == Fault("kill", worker=1, step=20, phase="compute")
    assert read_faults(None) == read_faults([]) == ()
    assert read_faults([fault]) == (fault,)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"worker": 1, "step": 2, "kind": "kil"}, r"did you mean kill\?.*kill, hang"),
        ({"worker": 1, "step": 2, "kind": "kill", "phase": "puhs"}, r"did you mean push\?"),
        ({"worker": 1, "step": 2, "kind": "nan", "phase": "teardown"}, "can happen in compute"),
        ({"worker": 1, "step": 2, "kind": "exit", "phase": "update"}, "can happen in compute, pu"),
        ({"worker": 1, "kind": "kill"}, "without a step or a rate"),
        ({"worker": 1, "kind": "kill", "step": 1, "rate": 0.1}, "with a step and a rate"),
        ({"step": 1, "kind": "kill"}, "without a worker"),
        ({"worker": -1, "step": 1, "kind": "kill"}, "worker=-1 .* must be a whole number"),
        ({"worker": 1, "step": 1.5, "kind": "kill"}, "step=1.5 .* must be a whole number"),
        ({"kind": "kill", "rate": 1.5}, "rate=1.5 .* above 0 and up to 1"),
        ({"worker": 1, "step": 1, "kind": "kill", "factor": 2}, "only slow and corrupt_gradient"),
        ({"worker": 1, "step": 1, "kind": "slow", "factor": 1}, "above 1 for slow"),
        ({"worker": 1, "step": 1, "kind": "kill", "steps": 2}, "only slow takes steps"),
        ({"worker": 1, "step": 1, "kind": "kill", "stpe": 2}, r"did you mean step\?"),
        ({"worker": 1, "step": 1}, "a mapping with a kind"),
        ("kill", "a mapping with a kind"),
    ],
)
def test_what_makes_no_sense_is_refused(given: Any, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        read_faults([given])


def test_faults_are_a_list() -> None:
    with pytest.raises(UserError, match="must be a list"):
        read_faults({"worker": 1, "step": 20, "kind": "kill"})


def test_whoever_is_to_fail_must_be_there() -> None:
    faults = read_faults([{"worker": 2, "step": 20, "kind": "kill"}])
    check_workers(faults, 3)
    with pytest.raises(UserError, match="there is no worker 2; there are 0 to 1"):
        check_workers(faults, 2)


def test_every_kind_can_happen_somewhere() -> None:
    assert all(phases and set(phases) <= set(PHASES) for phases in KINDS.values())


# ---- when ---------------------------------------------------------------------------------------


def kinds(schedule: Schedule, phase: str, step: int) -> list[str]:
    return [fault.kind for fault in schedule.due(phase, step)]


def test_a_fault_at_a_step_happens_once_also_to_who_comes_after() -> None:
    faults = [Fault("kill", 1, 3), Fault("hang", 1, 5), Fault("kill", 0, 3)]
    tally = FaultLog(len(faults), 2)
    first = Schedule(faults, 1, tally)
    assert [kinds(first, "compute", step) for step in range(5)] == [[], [], [], ["kill"], []]
    next_life = pickle.loads(pickle.dumps(tally))
    second = Schedule(faults, 1, next_life)
    assert [kinds(second, "compute", step) for step in (3, 4, 5)] == [[], [], ["hang"]]
    assert [(row["kind"], row["worker"]) for row in happened(faults, tally)] == [
        ("kill", 1),
        ("hang", 1),
    ]


def test_a_rare_phase_is_hit_at_its_first_occasion_from_the_step_on() -> None:
    schedule = Schedule([Fault("kill", 0, 10, "validation")], 0, FaultLog(1, 1))
    assert not kinds(schedule, "validation", 9) and not kinds(schedule, "compute", 12)
    assert kinds(schedule, "validation", 14) == ["kill"]


def occasions(rate: float, worker: int, seed: int = 0, n: int = 4000) -> list[int]:
    schedule = Schedule([Fault("nan", rate=rate, seed=seed)], worker, FaultLog(1, 2))
    return [step for step in range(n) if kinds(schedule, "compute", step)]


def test_random_faults_have_their_rate_and_come_again_with_their_seed() -> None:
    assert len(occasions(0.05, 0)) == pytest.approx(0.05 * 4000, rel=0.3)
    assert occasions(0.05, 0) == occasions(0.05, 0)
    assert occasions(0.05, 0) != occasions(0.05, 1), "each worker draws by itself"
    assert occasions(0.05, 0) != occasions(0.05, 0, seed=1)
    assert occasions(1, 0, n=5) == [0, 1, 2, 3, 4]
    assert occasions(1e-17, 0, n=5) == occasions(5e-324, 0, n=5) == []


def test_a_life_that_follows_a_death_does_not_die_at_the_same_occasion_again() -> None:
    faults, tally, lives = [Fault("kill", rate=0.2)], FaultLog(1, 1), []
    for _ in range(12):
        schedule = Schedule(faults, 0, tally)
        lives.append(next(n for n in range(1000) if kinds(schedule, "compute", n)))
    assert len(set(lives)) > 3


def test_a_rare_fault_keeps_its_rate_where_others_cut_lives_short() -> None:
    faults = [Fault("kill", rate=0.1), Fault("oom", rate=0.01)]
    tally, step, total = FaultLog(2, 1), 0, 8000
    while step < total:
        schedule = Schedule(faults, 0, tally)
        while step < total and not kinds(schedule, "compute", step):
            step += 1
            tally.reach(0, step, 4711)
    assert tally.count(0, 0) == pytest.approx(0.1 * total, rel=0.15)
    assert tally.count(1, 0) == pytest.approx(0.01 * total, rel=0.35)


def test_a_workers_steps_and_process_are_seen_by_all() -> None:
    tally = FaultLog(2, 3)
    pickle.loads(pickle.dumps(tally)).reach(2, 17, 4711)
    assert tally.progress(2) == (17, 4711) and tally.progress(1) == (0, 0)
