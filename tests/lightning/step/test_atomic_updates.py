"""Whoever is killed, and whenever: what is left is the state after one whole update.

Each trial is a run of processes of its own, whose parent keeps what every update has made (see
``scripts/trials``). An update is cut into many small pieces here, so that there is a middle of it.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from trials import work
from trials.apart import run_apart
from trials.cell import (
    SIZE,
    Case,
    Row,
    States,
    cases,
    in_small_chunks,
    try_out,
    undisturbed_states,
)
from trials.tap import same, state_in, tapped

from hybridtrain.engine.updates.thread_pool import Pool
from tests.picking import by_default

POLICIES = ["stop", "continue", "restart"]


@pytest.fixture(scope="module")
def undisturbed() -> States:
    """The state after every update of a run in lock-step in which nothing goes wrong."""
    return undisturbed_states("hybrid")


def check(row: Row) -> None:
    """Nothing torn, lost, twice or left; and plain torch makes the same of the same samples."""
    assert row.complaints == [], f"{row} {row.complaints}"
    assert row.updates > 0


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "phase",
    by_default(["compute", "push", "update", "pull", "checkpoint"], "update", "checkpoint"),
)
def test_a_worker_killed_in_any_phase_leaves_the_state_of_one_update(
    phase: str, undisturbed: States
) -> None:
    """The checkpoint of the end, and all before, are to the bit those of the undisturbed run."""
    row = try_out(
        Case("hybrid", "stop", "kill", phase, 0 if phase == "checkpoint" else 1), undisturbed
    )
    check(row)
    assert row.outcome == "stopped" and row.as_undisturbed
    assert row.checkpoints > 0 or phase == "checkpoint"


def test_a_worker_killed_in_its_update_running_freely_leaves_the_state_of_one() -> None:
    row = try_out(Case("async", "stop", "kill", "update"))
    check(row)
    assert row.outcome == "stopped" and row.checkpoints > 0


def test_a_new_process_running_freely_goes_on_where_the_others_are() -> None:
    row = try_out(Case("async", "restart", "kill", "compute"))
    check(row)
    assert row.outcome == "restarted" and row.home


class Halfway(Pool):
    """Something happens in the middle of the arithmetic of one update."""

    update = 12  # of 16; a checkpoint was written after 8

    @staticmethod
    def happens() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def map(self, function: Any, tasks: Any) -> Any:
        kind = type(self)
        kind.count += 1  # type: ignore[attr-defined]
        hit = kind.count == kind.update  # type: ignore[attr-defined]

        def each(lane: int, numbered: tuple[int, Any]) -> Any:
            if hit and numbered[0] == len(tasks) // 2:
                self.happens()
            return function(lane, numbered[1])

        return super().map(each, list(enumerate(tasks)))


class Failing(Halfway):
    """The arithmetic fails."""

    @staticmethod
    def happens() -> None:
        raise ArithmeticError("half of the update has been made")


def trial(pool: type[Halfway], folder: Path) -> tuple[str, States]:
    import hybridtrain.engine.server.server

    in_small_chunks()
    pool.count = 0  # type: ignore[attr-defined]
    hybridtrain.engine.server.server.Pool = pool  # type: ignore[misc]
    taps: list[Any] = []
    work.LISTENERS.append(lambda diary: taps.append(tapped(True, diary)))
    try:
        work.train("hybrid", SIZE, folder)
    except BaseException as error:
        return repr(error), taps[0].states
    return "", taps[0].states


def states_found(folder: Path) -> States:
    paths = sorted(folder.glob("*.ckpt"))
    return [state_in(torch.load(path, weights_only=True)) for path in paths]


def test_a_parent_killed_in_the_middle_of_an_update_leaves_whole_checkpoints_and_nothing_else(
    undisturbed: States,
) -> None:
    ending = run_apart(lambda f: trial(Halfway, f), 60.0, after=states_found)
    assert ending.status == -signal.SIGKILL and ending.left == []
    (state,) = ending.seen
    assert same(state, undisturbed[8])


def test_arithmetic_that_fails_half_way_is_not_saved(undisturbed: States) -> None:
    ending = run_apart(lambda f: trial(Failing, f), 60.0, after=states_found)
    error, states = ending.result
    assert "half of the update" in error and ending.left == []
    assert len(states) == Halfway.update, "the initial state, and eleven updates"
    (state,) = ending.seen
    assert same(state, undisturbed[8]), "and no checkpoint of the mixture"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("strategy", ["hybrid", "async"])
def test_every_eighth_case_of_the_fault_matrix_leaves_a_whole_update(
    strategy: str, policy: str, undisturbed: States
) -> None:
    """Every eighth case of it; ``scripts/fault_matrix.py`` tries all."""
    for case in cases([strategy], [policy])[POLICIES.index(policy) :: 8]:
        check(try_out(case, undisturbed))
