"""The advice at the end of a run on the command line."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from hybridtrain.cli import run
from hybridtrain.cli.commands.simulate import main
from hybridtrain.virtual import advice
from tests.cli.conftest import Command, summary
from tests.cli.tiny import TINY

SLOW = ["data.n=240", "trainer.max_epochs=1", "model.sleep_s=0.005", "trainer.devices=2"]
SLOW += ["faults=[{worker:1,step:0,kind:slow,factor:4}]", "test=false", "hydra.run.dir=here"]


@pytest.fixture(autouse=True)
def whatever_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine disturbs times, not what is said of them."""
    monkeypatch.setattr(advice, "MOST_ERROR", 1e9)
    monkeypatch.setattr(advice, "LEAST_FACTOR", 0.0)
    monkeypatch.setattr(advice, "LEAST_WAITING", 0.0)
    monkeypatch.setattr(run, "usable_cores", lambda: 1e9)


def test_a_run_with_a_straggler_ends_with_one_line_of_advice_whose_command_runs(
    command: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    done = command(*TINY, *SLOW)
    assert done.code == 0
    found = summary("here")["advice"]
    (line,) = [line for line in done.out.splitlines() if line.startswith("  advice")]
    assert line.split(maxsplit=1)[1] == f"{found['text']}: {found['command']}"
    assert found["strategy"].startswith("strategy=") and found["factor"] > 0
    assert not [line for line in done.out.splitlines() if line.startswith("  slow ")]
    assert main(shlex.split(found["command"])[4:]) == 0
    assert "hybrid" in capfd.readouterr().out


@pytest.mark.few(1)
@pytest.mark.parametrize("option", ["advice=false", "strategy.record=null", "strategy=ddp"])
def test_without_a_record_or_the_wish_there_is_no_advice(command: Command, option: str) -> None:
    options = [each for each in SLOW if not (option == "strategy=ddp" and "faults" in each)]
    done = command(*TINY, *options, "data.n=24", option)
    assert done.code == 0 and "advice" not in done.out
    assert summary("here")["advice"] is None


@pytest.mark.slow
def test_an_advice_that_fails_harms_nothing(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(run, "advise", broken)
    done = command(*TINY, "trainer.devices=2", "hydra.run.dir=here")
    assert (done.code, done.err) == (0, "") and summary("here")["advice"] is None
