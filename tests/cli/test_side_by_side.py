"""``hydra.launcher.at_once``: jobs side by side, each with cores, GPUs and a file of its own."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from hybridtrain.cli.sweep import side_by_side
from hybridtrain.cli.sweep.job_process import ENVIRONMENT
from hybridtrain.cli.sweep.side_by_side import LEAST_BYTES, Room, SweepJob, memory_of
from hybridtrain.engine.memory import limits
from hybridtrain.report import charts
from tests.cli.conftest import Command, summary
from tests.cli.test_interrupt import ENDLESS, _none_left
from tests.cli.tiny import TINY
from tests.cli.zygote import Zygote, wait_for
from tests.picking import by_default

GIB = 2**30


def job(
    tmp_path: Path, devices: Any = 1, accelerator: str = "cpu", per_device: int = 1
) -> SweepJob:
    config = {
        "trainer": {"devices": devices, "accelerator": accelerator},
        "strategy": {"workers_per_device": per_device},
        "hydra": {"sweep": {"dir": str(tmp_path), "subdir": "0"}, "job": {"num": 0}},
    }
    return SweepJob(OmegaConf.create(config), ())


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Eight cores, no limit, no GPU, 64 GiB; jobs that need nothing."""
    it = {"free": 64 * GIB, "used": {1: 0}}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(limits, "container_cores", lambda: None)
    monkeypatch.setattr(limits, "gpus", list)
    monkeypatch.setattr(limits, "available_bytes", lambda: it["free"])
    monkeypatch.setattr(side_by_side, "memory_of", lambda _: it["used"])
    monkeypatch.setattr(side_by_side, "_MEASURE_S", 0.0)
    monkeypatch.delitem(ENVIRONMENT, "CUDA_VISIBLE_DEVICES", raising=False)
    return it


class Process:
    """One that runs."""

    pid = 1


def test_a_number_of_jobs_at_once_shares_the_cores_evenly(
    machine: dict[str, Any], tmp_path: Path
) -> None:
    room, running = Room(3), list[Any]()
    found = []
    while (place := room.take(job(tmp_path), running)) is not None:
        found.append(place)
        running.append(Process())
    assert [x.cores for x in found] == [(0, 1), (2, 3), (4, 5)]
    room.give_back(found[1])
    again = room.take(job(tmp_path), running[1:])
    assert again is not None and again.cores == (2, 3)
    assert again.output == tmp_path / "0" / "output.txt"


def test_auto_takes_a_core_for_each_worker_and_waits_for_cores(
    machine: dict[str, Any], tmp_path: Path
) -> None:
    room, running = Room("auto"), list[Any]()
    first = room.take(job(tmp_path, 3, per_device=2), running)
    assert first is not None and first.cores == (0, 1, 2, 3, 4, 5)
    running.append(Process())
    assert room.take(job(tmp_path, 4), running) is None
    second = room.take(job(tmp_path, "auto"), running)
    assert second is not None and second.cores == (6,)
    room.give_back(first)
    alone = Room("auto").take(job(tmp_path, 100), [])
    assert alone is not None and alone.cores == tuple(range(8))  # more workers than cores


def test_auto_waits_for_memory_as_much_as_the_largest_job_has_had(
    machine: dict[str, Any], tmp_path: Path
) -> None:
    room = Room("auto")
    assert room.take(job(tmp_path), []) is not None
    machine |= {"used": {1: 6 * GIB}, "free": 5 * GIB}
    assert room.take(job(tmp_path), [Process()]) is None  # type: ignore[list-item]
    machine |= {"used": {1: 1 * GIB}, "free": 9 * GIB}  # another one, which may grow by 5
    assert room.take(job(tmp_path), [Process()]) is None  # type: ignore[list-item]
    machine["free"] = 11 * GIB
    assert room.take(job(tmp_path), [Process()]) is not None  # type: ignore[list-item]
    assert LEAST_BYTES == GIB


@pytest.mark.parametrize("at_once", ["auto", 2])
def test_jobs_on_gpus_get_gpus_of_their_own(
    machine: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: Any
) -> None:
    monkeypatch.setitem(ENVIRONMENT, "CUDA_VISIBLE_DEVICES", "4,5,7")
    room, running = Room(at_once), list[Any]()
    first = room.take(job(tmp_path, 2, "auto"), running)
    running.append(Process())
    assert first is not None and first.gpus == ("4", "5")
    second = room.take(job(tmp_path, 2, "auto"), running)
    if at_once == "auto":
        assert second is None
    else:  # it was asked for: they share
        assert second is not None and second.gpus == ()


def test_memory_is_that_of_a_jobs_processes() -> None:
    own = os.getpgid(0)
    assert memory_of({own, 2**22})[own] > 10 * 2**20
    assert memory_of({own, 2**22})[2**22] == 0


def test_two_jobs_at_once_write_each_to_its_own_file_and_into_one_table(
    command: Command, tmp_path: Path
) -> None:
    options = ["model.lr=0.01,0.02,0.03", "hydra.launcher.at_once=2", "hydra.sweep.dir=jobs"]
    result = command("-m", *TINY, *options, "model.sleep_s=0.02", "task.metric=train/loss")
    assert (result.code, result.err) == (0, "")
    spans = []
    for number in range(3):
        found = summary(f"jobs/{number}")
        assert "Finished after" in Path(f"jobs/{number}/output.txt").read_text()
        loss = f"{charts.number(found['metrics']['train/loss'])}"
        row = f"{number}    model.lr=0.0{number + 1}  {loss}"
        assert row in result.out
        spans.append(Path(f"jobs/{number}/.hydra/config.yaml").stat().st_mtime)
    assert spans[1] < Path("jobs/0/summary.json").stat().st_mtime  # it began before the first ended
    assert "Finished after" not in result.out
    lines = [x for x in result.out.splitlines() if x.startswith("---")]
    assert len(lines) == 6 and lines[0].endswith("(output: jobs/0/output.txt)")


@pytest.mark.slow
@pytest.mark.parametrize("ending", by_default(["SIGINT", "SIGTERM", "SIGKILL"], "SIGINT"))
def test_an_end_of_the_sweep_ends_all_its_jobs(zygote: Zygote, ending: str) -> None:
    options = ["model.lr=0.01,0.02,0.03", "hydra.launcher.at_once=2", "hydra.sweep.dir=jobs"]
    run = zygote.start(Path.cwd(), "-m", *ENDLESS, *options)
    for number in (0, 1):
        run.until(f"jobs/{number}/checkpoints/last.ckpt")
    signum = signal.Signals[ending]
    os.kill(run.pid, signum)
    assert run.status() == (-signum if ending == "SIGKILL" else 128 + signum)
    assert _none_left(run.pid)
    wait_for(lambda: run.left() == [], run.said)
    assert not Path("jobs/2").exists()
    if ending != "SIGKILL":
        assert [summary(f"jobs/{i}")["exit"] for i in (0, 1)] == [128 + signum] * 2
        endings = json.loads(Path("jobs/jobs.json").read_text())
        assert [x["exit"] for x in endings.values()] == [128 + signum] * 2
        assert "to go on: python -m hybridtrain -m resume=jobs\n" in run.said()
        assert "no metric to compare" not in run.said()


@pytest.mark.slow
def test_two_jobs_that_were_killed_at_once_are_both_resumed(
    zygote: Zygote, command: Command
) -> None:
    options = [*TINY, "trainer.max_epochs=6", "model.sleep_s=0.03", "hydra.sweep.dir=jobs"]
    options += ["model.lr=0.01,0.02,0.03", "hydra.launcher.at_once=2"]
    run = zygote.start(Path.cwd(), "-m", *options)
    for number in (0, 1):
        run.until(f"jobs/{number}/checkpoints/last.ckpt")
    os.kill(run.pid, signal.SIGKILL)
    run.status()
    wait_for(lambda: run.left() == [], run.said)
    assert command("-m", *options, "resume=auto").code == 0
    resumed = [summary(f"jobs/{i}")["resumed"] for i in range(3)]
    assert all(resumed[:2]) and resumed[2] is None


@pytest.mark.slow
@pytest.mark.parametrize("bad", ["0", "many", "1.5"])
def test_a_number_of_jobs_that_is_none_is_one_line(command: Command, bad: str) -> None:
    result = command("-m", *TINY, "model.lr=1,2", f"hydra.launcher.at_once={bad}")
    assert result.code == 2 and "hydra.launcher.at_once" in result.complaint


@pytest.mark.slow
def test_jobs_in_fresh_interpreters_run_side_by_side_too(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    options = ["model.lr=0.01,0.02", "hydra.launcher.at_once=2", "hydra.sweep.dir=jobs"]
    result = command("-m", *TINY, *options, "hydra.launcher.start_method=popen")
    assert (result.code, result.err) == (0, "")
    for number in (0, 1):
        assert summary(f"jobs/{number}")["exit"] == 0
        assert "Finished after" in Path(f"jobs/{number}/output.txt").read_text()
