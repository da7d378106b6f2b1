"""Slurm itself, with two nodes on this machine: the example of docs/hosts.md trains."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.conftest import summary
from tests.support.several_hosts import free_port

ROOT = Path(__file__).parents[2]
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
CONFIGURATION = """
ClusterName=test
SlurmctldHost={name}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=zz NodeHostname={name} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=all Nodes=ALL Default=YES State=UP
"""
SCRIPT = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
srun {python} -m {command} trainer.num_nodes=2 strategy.hosts_key=$PWD/hosts.key {options}
"""


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Its daemons, until the test has ended."""
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:/usr/sbin")
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        pytest.skip(f"needs Slurm: apt-get install slurm-wlm munge ({', '.join(missing)})")
    folder, name = tmp_path / "slurm", socket.gethostname()
    (folder / "state").mkdir(parents=True)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    given = {"folder": folder, "name": name, "ports": [free_port() for _ in range(3)]}
    user = subprocess.check_output(["id", "-un"], text=True).strip()
    (folder / "slurm.conf").write_text(CONFIGURATION.format(user=user, **given))
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    kinds = ("key-file=munge.key", "socket=munge.socket", "log-file=munge.log")
    kinds += ("seed-file=munge.seed", "pid-file=munge.pid")
    places = [f"--{kind.replace('=', f'={folder}/')}" for kind in kinds]
    with (
        daemon("munged", "--foreground", "--force", *places),
        daemon("slurmctld", "-D"),
        daemon("slurmd", "-D", "-N", name),
        daemon("slurmd", "-D", "-N", "zz"),
    ):
        until = time.monotonic() + 60.0
        while "idle" not in (said := asked("sinfo", "--noheader", "--nodes", f"{name},zz")):
            assert time.monotonic() < until, said
            time.sleep(0.5)
        yield


@contextmanager
def daemon(*command: str) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def asked(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


def batch(command: str, options: str) -> tuple[int, str]:
    """The status and the output of a job of two tasks."""
    script = SCRIPT.format(python=sys.executable, command=command, options=options)
    Path("run.sh").write_text(script)
    done = subprocess.run(
        ["sbatch", "--wait", "--output=out.txt", f"--export=ALL,PYTHONPATH={ROOT}", "run.sh"],
        timeout=400,
    )
    return done.returncode, Path("out.txt").read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_doctor_looks_at_two_nodes_and_then_they_train(slurm: None) -> None:
    pytest.importorskip("cryptography")
    subprocess.run(
        [sys.executable, "-m", "hybridtrain", "key", "hosts.key"],
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    tiny = "model._target_=tests.cli.tiny.TinyModule data._target_=tests.cli.tiny.TinyData "
    tiny += "trainer.max_epochs=2 trainer.accelerator=cpu trainer.devices=1 hydra.run.dir=run"
    status, said = batch("hybridtrain doctor", f"{tiny} wait_s=300")
    assert status == 0, said
    assert "ok    host 1  agreement" in said and "host 1  connection" in said
    status, said = batch("hybridtrain", f"{tiny} logger=none")
    assert status == 0, said
    assert summary("run")["exit"] == 0
    assert f"host 1 of 2: 1 worker, relay to {socket.gethostname()}" in said
