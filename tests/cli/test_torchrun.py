"""Two agents of torchrun: a host is lost, and all start again as one new run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.cli.conftest import summary
from tests.cli.tiny import TinyModule

ROOT = Path(__file__).parents[2]


class LosesAHost(TinyModule):
    """A worker on that host kills its parent, once. ``flag``: a file that says it has."""

    def __init__(self, flag: str, host: int = 1, step: int = 3) -> None:
        super().__init__()
        self.flag, self.host, self.step = Path(flag), str(host), step

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        there = os.environ["GROUP_RANK"] == self.host
        if there and self.global_step == self.step and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getppid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def agent(port: int, *options: str) -> subprocess.Popen[str]:
    torchrun = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "a"]
    again = ["--local-addr", "127.0.0.1", "--max-restarts", "1", "-m", "hybridtrain"]
    return subprocess.Popen(
        [sys.executable, *torchrun, *meeting, *again, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
    )


class KillsTheAgent(TinyModule):
    """Kills torchrun's agent; ``flag``: a file with the number of the process that trains."""

    def __init__(self, flag: str) -> None:
        super().__init__()
        self.flag = Path(flag)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.global_step == 3:
            parent = os.getppid()
            self.flag.write_text(str(parent))
            stat = Path(f"/proc/{parent}/stat").read_text()
            os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
        if self.global_step >= 3:
            time.sleep(1)
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks /proc for parents")
def test_a_run_ends_with_the_agent_that_started_it(tmp_path: Path) -> None:
    options = {
        "model._target_": "tests.cli.test_torchrun.KillsTheAgent",
        "model.flag": str(tmp_path / "parent"),
        "data._target_": "tests.cli.tiny.TinyData",
        "trainer.accelerator": "cpu",
        "trainer.max_epochs": 200,
        "logger": "none",
        "hydra.run.dir": str(tmp_path / "run"),
    }
    torchrun = ["-m", "torch.distributed.run", "--standalone", "-m", "hybridtrain"]
    given = [f"{name}={value}" for name, value in options.items()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, *torchrun, *given], env=environment, capture_output=True)
    process = int((tmp_path / "parent").read_text())
    while Path(f"/proc/{process}").exists():
        time.sleep(0.1)
    assert summary(tmp_path / "run")["exit"] == 143


def both(tmp_path: Path, *more: str) -> list[str]:
    """What two agents with a host each have said."""
    pytest.importorskip("cryptography")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = {
        "model._target_": "tests.cli.test_torchrun.LosesAHost",
        "model.flag": str(tmp_path / "lost"),
        "data._target_": "tests.cli.tiny.TinyData",
        "trainer.accelerator": "cpu",
        "trainer.devices": 1,
        "trainer.num_nodes": 2,
        "logger": "none",
    }
    options = [*(f"{name}={value}" for name, value in given.items()), *more]
    agents: list[Any] = [agent(port, *options) for _ in range(2)]
    try:
        said = [each.communicate(timeout=500)[0] for each in agents]
    finally:
        for each in agents:
            each.kill()
    assert [each.returncode for each in agents] == [0, 0], said
    assert (tmp_path / "lost").exists()
    return said


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_hosts_start_again_though_each_agent_has_a_restart_count_of_its_own(
    tmp_path: Path,
) -> None:
    said = both(tmp_path, "trainer.max_epochs=2", f"hydra.run.dir={tmp_path / 'run'}")
    assert summary(tmp_path / "run")["exit"] == 0
    assert "".join(said).count("host 1 of 2: 1 worker, relay to 127.0.0.1") == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_host_0_is_lost_and_all_go_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    options = ["model.host=0", "model.step=15", "trainer.max_epochs=3", "resume=auto"]
    said = "".join(both(tmp_path, *options, f"hydra.run.dir={runs}/${{now:%H%M%S%f}}"))
    (run,) = runs.iterdir()
    found = summary(run)
    assert found["exit"] == 0 and found["updates"] == 6, found  # of the last epoch
    assert "host 0, which has the parameters, is lost: " in said
    assert f"{run} goes on from last.ckpt" in said
