"""Ctrl-C, SIGTERM and SIGHUP: a checkpoint, the shell's exit status, no process left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hybridtrain.util.files import fault_of
from tests.cli.conftest import summary
from tests.cli.tiny import TINY
from tests.cli.zygote import Zygote, wait_for
from tests.picking import by_default

ENDLESS = [*TINY, "trainer.max_epochs=100000", "model.sleep_s=0.01", "trainer.log_every_n_steps=1"]


def _processes_of(session: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def _none_left(session: int) -> bool:
    deadline = time.monotonic() + 10
    while _processes_of(session) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not _processes_of(session)


@pytest.mark.parametrize(
    ("strategy", "signum", "to_group"),
    [
        ("hybrid", signal.SIGINT, True),
        pytest.param("hybrid", signal.SIGTERM, False, marks=pytest.mark.slow),
        pytest.param("hybrid", signal.SIGHUP, True, marks=pytest.mark.slow),
        pytest.param("ddp", signal.SIGINT, False, marks=pytest.mark.slow),
        pytest.param("ddp", signal.SIGHUP, False, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_a_run_with_a_checkpoint_and_the_shells_status(
    zygote: Zygote, strategy: str, signum: signal.Signals, to_group: bool
) -> None:
    run = zygote.start(
        Path.cwd(), *ENDLESS, f"strategy={strategy}", "trainer.devices=2", "hydra.run.dir=here"
    )
    run.until("here/.run_stats.json")
    run.until("here/checkpoints/last.ckpt")
    (os.killpg if to_group else os.kill)(run.pid, signum)
    assert run.status() == 128 + signum
    assert _none_left(run.pid)
    found = summary("here")
    assert found["exit"] == 128 + signum
    assert found["updates"] > 0
    path = Path(found["checkpoint"])
    assert fault_of(path) is None
    if strategy == "hybrid":  # one, of one moment, and nothing else was written after it
        assert path.name == "interrupted.ckpt"
        step = torch.load(path, weights_only=True)["global_step"]
        assert step == found["updates"]
        others = list((path.parent / "checkpoints").iterdir())
        assert not [x for x in others if x.stat().st_mtime > path.stat().st_mtime]


def test_a_second_signal_ends_a_run_at_once_though_its_workers_do_not_listen(
    zygote: Zygote,
) -> None:
    Path("diary").mkdir()
    deaf = ["model.sleep_s=1000", f"model.diary={Path('diary').absolute()}", "trainer.devices=2"]
    run = zygote.start(Path.cwd(), *TINY, *deaf, "strategy.stop_grace_s=1000")
    wait_for(lambda: len(list(Path("diary").iterdir())) == 2, run.said)  # both sleep in their step
    os.kill(run.pid, signal.SIGTERM)
    time.sleep(1.5)  # sooner, it would be the same one again
    assert run.pid in run.processes()
    os.kill(run.pid, signal.SIGTERM)
    assert run.status() == 143
    assert _none_left(run.pid)


def test_an_interrupt_while_the_command_is_imported_prints_nothing(tmp_path: Path) -> None:
    (tmp_path / "hydra.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    found = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    command = [sys.executable, "-m", "hybridtrain", "task=digits"]
    done = subprocess.run(command, env=found, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGINT
    assert done.stdout + done.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("signum", by_default([signal.SIGINT, signal.SIGHUP], signal.SIGINT))
def test_a_signal_ends_a_sweep_and_the_job_saves_a_checkpoint(
    zygote: Zygote, signum: signal.Signals
) -> None:
    options = ["strategy=hybrid,ddp", "trainer.devices=2", "hydra.sweep.dir=jobs"]
    run = zygote.start(Path.cwd(), "-m", *ENDLESS, *options)
    run.until("jobs/0/.run_stats.json")
    run.until("jobs/0/checkpoints/last.ckpt")
    os.killpg(run.pid, signum)
    assert run.status() == 128 + signum
    assert _none_left(run.pid)
    assert summary("jobs/0")["exit"] == 128 + signum
    assert not Path("jobs/1").exists()


def test_a_killed_sweep_takes_its_job_along(zygote: Zygote) -> None:
    run = zygote.start(Path.cwd(), "-m", *ENDLESS, "trainer.devices=2,1", "hydra.sweep.dir=jobs")
    run.until("jobs/0/.run_stats.json")
    os.kill(run.pid, signal.SIGKILL)
    assert run.status() == -signal.SIGKILL
    assert _none_left(run.pid)
