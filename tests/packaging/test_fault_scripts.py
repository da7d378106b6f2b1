"""``scripts/fault_matrix.py`` and ``scripts/soak.py``: what they make of what they have seen."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from trials.apart import run_apart
from trials.cell import Case, Row, cases
from trials.soaking import SIZE, Soaked, Wish, rates, soak
from trials.tap import Part, Tap, farthest, recomputed

from tests.support.scripts import loaded

ROOT = Path(__file__).parents[2]


def test_the_matrix_has_every_kind_in_every_phase_that_it_can_happen_in() -> None:
    found = cases(["hybrid", "async"], ["stop", "continue", "restart"])
    elsewhere = sum(case.phase != "checkpoint" for case in found if case.worker == 0)
    assert len(found) == len(set(found)) == 6 * 37 + elsewhere and elsewhere > 50
    assert {case.worker for case in found if case.phase == "checkpoint"} == {0}


def test_a_cell_complains_of_whatever_must_not_be() -> None:
    fine = Row(Case("hybrid", "restart", "kill", "push"), "restarted", as_undisturbed=True)
    assert fine.complaints == []
    for name, value in {
        "outcome": "hung",
        "torn": 1,
        "lost": 4,
        "doubled": 1,
        "difference": 1e-2,
        "as_undisturbed": False,
        "home": False,
        "left": ["process 7 (python)"],
    }.items():
        assert len(Row(**{**vars(fine), name: value}).complaints) == 1, name
    in_hook = Case("hybrid", "restart", "kill", "validation")
    assert Row(in_hook, "restarted", as_undisturbed=False).complaints == [], "it is repeated"
    report = loaded("fault_matrix").report([fine, Row(Case("hybrid", "stop", "hang", "pull"))])
    assert "| kill | push | restarted, = bits | – |" in report
    assert "| hang | pull | – | **hung: hung** |" in report and "Hung: 1." in report


def part(worker: int, samples: tuple[int, ...], version: int) -> Part:
    return Part(worker, samples, float(len(samples)), version)


def test_what_plain_torch_makes_of_the_same_mini_batches_tells_a_missing_one() -> None:
    parts = [[part(0, (0, 1), 0), part(1, (2, 3), 0)], [part(0, (4, 5), 1), part(1, (6,), 0)]]
    tap = Tap(True, torch.zeros(2, 4))
    tap.parts = parts
    tap.states = [{"parameters": values} for values in recomputed(tap, 8)]
    assert len(tap.states) == 3 and farthest(tap, 8) == 0
    tap.parts = [parts[0], parts[1][:1]]
    assert farthest(tap, 8) > 1e-3
    tap.parts = [parts[0], [parts[1][0], part(1, (6,), 1)]]
    assert farthest(tap, 8) > 1e-5, "another version"


def leaving(folder: Path) -> None:
    import os
    import tempfile
    import time

    if os.fork() == 0:
        time.sleep(100)
    Path(tempfile.mkstemp()[1]).write_text("left")


def test_what_a_trial_leaves_is_seen_and_ended() -> None:
    ending = run_apart(leaving, 20.0)
    assert ending.status == 0
    assert Counter(each.partition(" ")[0].partition("/")[0] for each in ending.left) == {
        "process": 1,
        "tmp": 1,
    }


def test_random_faults_come_about_as_often_as_they_should() -> None:
    assert 1 / sum(fault["rate"] for fault in rates(200.0)) == pytest.approx(200.0)


@pytest.mark.slow
def test_a_short_soak_without_faults_uses_each_sample_once_an_epoch() -> None:
    run = soak("async", Wish(epochs=1))
    assert (run.outcome, run.missing, run.twice, run.left) == ("finished", 0, 0, [])
    assert run.updates == SIZE.samples / SIZE.batch


def test_the_table_of_a_soak_holds_the_loss_against_undisturbed_runs() -> None:
    def run(disturbed: bool, loss: float, **more: Any) -> Soaked:
        return Soaked("async", 9, disturbed, "finished", loss=loss, **more)

    runs = [
        run(True, 0.5, faults={"kill in push": 2}, wall_s=90.0),
        run(False, 0.4),
        run(False, 0.6, seed=8),
    ]
    table = loaded("soak").table(runs)
    assert "bit" not in table
    assert "| `async` | 1.5 | 2 (2 kill in push) |" in table
    assert "0.5 (0.4 to 0.6 undisturbed)" in table
    same = loaded("soak").table([*runs, run(False, 0.5)])
    assert "0.5, to the bit that of the undisturbed run (0.4 to 0.6 undisturbed)" in same


def test_in_lock_step_a_soak_must_come_to_what_the_undisturbed_run_of_its_seed_has() -> None:
    differs = loaded("soak").differs
    for strategy in ("hybrid", "async"):
        disturbed = Soaked(strategy, 9, True, "finished", loss=0.5)
        other = Soaked(strategy, 9, False, "finished", loss=0.6, seed=8)
        same = Soaked(strategy, 9, False, "finished", loss=0.5)
        wrong = Soaked(strategy, 9, False, "finished", loss=0.50001)
        assert not differs(disturbed, [disturbed, same, other])
        assert differs(disturbed, [disturbed, wrong, other]) == (strategy == "hybrid")


def test_several_are_hit_in_the_same_step_and_hogwild_has_no_update_of_the_servers() -> None:
    found = cases(["ssp", "hogwild"], ["restart"], at_once=(2, 3))
    assert len(found) == 2 * 2 * 6
    assert {tuple(case.workers) for case in found} == {(1, 2), (0, 1, 2)}
    alone = cases(["hogwild"], ["restart"])
    assert "update" not in {case.phase for case in alone} and len(alone) == 37 - 2
