"""``profile=true`` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Command
from tests.cli.tiny import TINY

RUN = [*TINY, "trainer.devices=2", "test=false"]


def test_a_profiled_run_prints_a_table_and_leaves_two_files(command: Command) -> None:
    done = command(*RUN, "profile=true", "hydra.run.dir=here")
    assert done.code == 0, done.err
    assert "Where the time went" in done.out and "here/timeline.json shows every step" in done.out
    figures = json.loads(Path("here/profile.json").read_text())
    assert [figures["workers"][w]["steps"] for w in "01"] == [12, 12]
    assert json.loads(Path("here/timeline.json").read_text())["traceEvents"]
    assert not list(Path("here").glob(".profile*"))


def test_a_run_without_profile_true_leaves_no_profile(command: Command) -> None:
    done = command(*RUN, "hydra.run.dir=here")
    assert done.code == 0 and "Where the time went" not in done.out
    assert not Path("here/profile.json").exists()


@pytest.mark.slow
def test_each_job_of_a_sweep_has_a_profile_of_its_own_also_under_ddp(command: Command) -> None:
    done = command("-m", *RUN, "profile=true", "strategy=async,ddp", "hydra.sweep.dir=jobs")
    assert done.code == 0, done.err
    for job in "01":
        figures = json.loads(Path(f"jobs/{job}/profile.json").read_text())
        assert sum(worker["steps"] for worker in figures["workers"].values()) == 24


def test_a_profile_option_that_makes_no_sense_is_refused(command: Command) -> None:
    done = command(*RUN, "profile=often")
    assert done.code == 2 and "profile=often was given; it must be true or false" in done.complaint
    done = command(*RUN, "profile=true", "trainer.profiler=simple")
    assert done.code == 2 and "leave one of them out" in done.complaint


@pytest.mark.slow
def test_a_profiled_run_replays(command: Command) -> None:
    from hybridtrain.cli.commands.replay import main

    assert command(*RUN, "profile=true", "hydra.run.dir=here").code == 0
    before = Path("here/profile.json").stat().st_mtime_ns
    assert main(["run=here"]) == 0
    assert Path("here/profile.json").stat().st_mtime_ns == before
