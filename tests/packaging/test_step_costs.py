"""scripts/step_costs.py counts what a step costs, by cause."""

from __future__ import annotations

import sys

import pytest
import step_costs

from hybridtrain.errors import UserError

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it reads /proc")


@pytest.mark.slow
@linux
def test_what_a_worker_does_is_all_of_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    rows = step_costs.trained("hybrid", 2, 0.0, samples=False, profiled=False)
    assert len(rows) == 2
    for row in rows:
        assert row["cpu"] > 0 and row["cpu"] + row["queued"] < 1.2 * row["wall"]
        assert row["sent"] < 0.5 and row["received"] < 0.5
    told = step_costs.counted(rows, alone=False)
    together, computing, queued, asleep = (float(each.replace(",", "")) for each in told[:4])
    assert computing + queued + asleep >= 0.98 * together
    assert step_costs.counted(rows, alone=True)[4] == "0"


@linux
def test_steps_without_asking_say_less() -> None:
    (row,) = step_costs.trained("hogwild", 1, 0.0, samples=False, profiled=False)
    assert row["sent"] < 0.5


def test_a_table_has_a_row_for_each_way() -> None:
    made = step_costs.table(["a", "b"], [["1", "2"], ["3", "4"]])
    assert made.splitlines() == ["| a | b |", "| --- | --- |", "| 1 | 2 |", "| 3 | 4 |"]


def test_phases_are_means_of_all_workers() -> None:
    workers = {
        "0": {"phases": {"forward": {"us_per_step": 10.0}}},
        "1": {"phases": {"forward": {"us_per_step": 30.0}, "wait": {"us_per_step": 8.0}}},
    }
    told = dict(zip(step_costs.PHASES, step_costs.by_phase({"workers": workers}), strict=True))
    assert (told["forward"], told["wait"], told["loop"]) == ("20", "4", "0")


@pytest.mark.parametrize(
    "given", ["data=all", "workers=two", "worker=2", "seconds=x", "strategies=hybrid,hibrid"]
)
def test_what_makes_no_sense_is_refused(given: str) -> None:
    with pytest.raises(UserError):
        step_costs.run([given])
