"""``python -m hybridtrain ray`` on a Ray cluster of two nodes on this machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from torch import Tensor

from hybridtrain.cli.commands import ray as engine
from tests.cli.conftest import summary
from tests.cli.tiny import N, TinyModule

ROOT = Path(__file__).parents[2]
LIMIT_S = 300.0


class OnHost1(TinyModule):
    """Behind its third step on host 1: writes the command lines of all processes, or misbehaves."""

    def __init__(self, folder: str, how: str = "look") -> None:
        super().__init__()
        self.folder, self.how = Path(folder), how

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        again = (self.folder / "actor").exists()
        if os.environ["NODE_RANK"] == "1" and self.global_step == 3 and not again:
            (self.folder / "actor").write_text(str(_parent(os.getppid())))
            if self.how == "raise":
                raise RuntimeError("this module fails on purpose")
            if self.how == "lose":
                os.kill(_parent(os.getppid()), signal.SIGKILL)
            if self.how == "wait":
                time.sleep(LIMIT_S)  # until the node is lost
            seen = [x.read_bytes() for x in Path("/proc").glob("[0-9]*/cmdline") if x.exists()]
            (self.folder / "seen").write_bytes(b"\n".join(seen))
        return super().training_step(batch, batch_idx)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Its address; two nodes with two cores each."""
    with two_nodes() as made:
        yield made.address


@contextmanager
def two_nodes() -> Iterator[Any]:
    """A cluster of two nodes with two cores each; several may be there at a time."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'hybridtrain[ray]'")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("SLURM_NTASKS", "7")  # as if Ray were started by it
        patch.setenv("RAY_worker_niceness", "0")  # a busy machine would starve them
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
        made.add_node(num_cpus=2)
        made.wait_for_nodes()
        yield made
        made.shutdown()


def _node_with(actor: int, made: Any) -> Any:
    """The node whose raylet has started this process."""
    for node in made.list_all_nodes():
        if _parent(actor) in [each.process.pid for each in node.all_processes["raylet"]]:
            return node
    raise AssertionError(f"no node has started {actor}")


def wait_for(file: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + LIMIT_S
    while not file.exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.1)


def started(cluster: str, folder: Path, *more: str, **model: Any) -> subprocess.Popen[str]:
    given = {
        "model._target_": "tests.cli.test_ray.OnHost1",
        "model.folder": str(folder),
        "data._target_": "tests.cli.tiny.TinyData",
        "trainer.accelerator": "cpu",
        "trainer.devices": 1,
        "trainer.num_nodes": 2,
        "trainer.max_epochs": 2,
        "logger": "none",
        "hydra.run.dir": "run",
        **{f"model.{name}": value for name, value in model.items()},
    }
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "hybridtrain",
            "ray",
            *(f"{k}={v}" for k, v in given.items()),
            *more,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": cluster},
        cwd=folder,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        said = process.communicate(timeout=LIMIT_S)[0]
    finally:
        process.kill()
    return process.returncode, said


def assert_nothing_is_left() -> None:
    until = time.monotonic() + 60.0
    while left := [x for x in Path("/proc").glob("[0-9]*/cmdline") if b"die_with_parent" in _of(x)]:
        assert time.monotonic() < until, left
        time.sleep(0.1)


def _of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def marked(test: Any) -> Any:
    return pytest.mark.slow(pytest.mark.timeout(600)(test))


def test_without_ray_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert engine.main(["trainer.num_nodes=2", "task=digits"]) == 2
    assert "pip install 'hybridtrain[ray]'" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (["trainer.num_nodes=2"], "there is no Ray cluster; start one with ray start --head"),
        (["trainer.num_nodes=1"], "trainer.num_nodes=1 was given; give the number of nodes"),
        (["trainer.num_nodes=2", "cpus=-1"], "cpus=-1 was given"),
        (["trainer.num_nodes=2", "trainer.devices=auto"], "trainer.devices=auto was given"),
    ],
)
def test_bad_input_is_one_line(
    given: list[str],
    match: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name in ("ray", "ray.util.placement_group", "ray.util.scheduling_strategies"):
        monkeypatch.setitem(sys.modules, name, Mock())
    monkeypatch.setitem(sys.modules, "ray.util", Mock())
    sys.modules["ray"].cluster_resources.return_value = {}  # type: ignore[attr-defined]
    if given == ["trainer.num_nodes=2"]:
        sys.modules["ray"].init.side_effect = ConnectionError  # type: ignore[attr-defined]
    before = signal.getsignal(signal.SIGTERM)
    assert engine.main(["task=digits", *given]) == 2
    assert signal.getsignal(signal.SIGTERM) is before
    assert match in capfd.readouterr().err


END = StopIteration()


class FakeRay:
    """Hosts print, end and are lost as the script has it: pairs of a host and what it says."""

    exceptions = SimpleNamespace(RayError=RuntimeError)

    def __init__(self, *script: tuple[int, Any]) -> None:
        self.script, self.started, self.killed = list(script), list[tuple[int, int]](), 0

    def make(self, bundle: int) -> Any:
        def run(_: Any, variables: dict[str, str], *__: Any) -> Any:
            self.started.append((bundle, int(variables["NODE_RANK"])))
            return Stream(self, int(variables["NODE_RANK"]))

        made = Mock()
        made.node.remote = lambda: engine.Node(f"node {bundle}", "there", 7)
        made.run.remote = run
        return made

    def get_runtime_context(self) -> Any:
        return Mock(get_node_id=lambda: "node 1")

    def wait(self, streams: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return [x for x in streams if self.script and x.host == self.script[0][0]][-1:], []

    def get(self, said: Any) -> Any:
        if isinstance(said, Exception):
            raise said
        return said

    def kill(self, actor: Any) -> None:
        self.killed += 1


class Stream:
    """What an actor yields."""

    def __init__(self, ray: FakeRay, host: int) -> None:
        self.ray, self.host = ray, host

    def __next__(self) -> Any:
        said = self.ray.script.pop(0)[1]
        if said is END:
            raise END
        return said


LOST = RuntimeError("Traceback\nthe node died")
WELL = [(0, "epoch 1\n"), (1, 0), (1, END), (0, 0), (0, END)]
SCRIPTS: dict[str, tuple[str, list[Any], int, list[int], str]] = {
    "all is well": ("stop", WELL, 0, [0, 1], ""),
    "host 0 fails": ("stop", [(0, 3), (0, END), (1, 1), (1, END)], 3, [0, 1], "status 3"),
    "a node is lost": ("stop", [(1, LOST), (0, 1), (0, END)], 1, [0, 1], "(the node died)"),
    "the others go on": ("continue", [(1, LOST), (0, 0), (0, END)], 0, [0, 1], "is lost with"),
    "it comes back": ("restart", [(1, LOST), *WELL], 0, [0, 1, 1], "is lost with its node"),
    "bad input": ("restart", [(1, 2), (1, END), (0, 1), (0, END)], 1, [0, 1], "status 2"),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_other_hosts_stop_or_go_on_as_on_failure_says_when_one_ends(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    on_failure, script, status, started, said = SCRIPTS[name]
    fake = FakeRay(*script)
    assert engine.RayRun(fake, fake.make, 2, on_failure).watch([], b"") == status
    # Host 0 is on the node of the command, which has bundle 1; a lost host is back in its own.
    assert fake.started == [(1 - host, host) for host in started] and fake.killed == 2
    assert said in capfd.readouterr().err and fake.script == []


def test_hosts_that_do_not_end_by_themselves_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_GRACE_S", 0.01)
    fake = FakeRay((1, LOST))
    assert engine.RayRun(fake, fake.make, 2, "stop").watch([], b"") == 1
    assert fake.killed == 2


@marked
def test_two_nodes_train_as_two_hosts_and_no_command_line_has_the_key(
    cluster: str, tmp_path: Path
) -> None:
    status, said = ended(started(cluster, tmp_path))
    assert status == 0, said
    assert summary(tmp_path / "run")["exit"] == 0
    assert "host 1 of 2: 1 worker, relay to " in said and "Finished after" in said
    seen = (tmp_path / "seen").read_bytes()
    assert seen.count(b"strategy.hosts_key=/proc/self/fd/") >= 2 and b"PRIVATE" not in seen
    assert_nothing_is_left()


@marked
def test_a_host_that_fails_ends_the_others(cluster: str, tmp_path: Path) -> None:
    status, said = ended(started(cluster, tmp_path, how="raise"))
    assert status == 1, said
    assert "this module fails on purpose" in said
    assert re.search("hybridtrain: host 0 of 2, [0-9.]+, has ended with status 1", said)
    assert_nothing_is_left()


@marked
def test_a_lost_actor_is_a_lost_host(cluster: str, tmp_path: Path) -> None:
    status, said = ended(started(cluster, tmp_path, how="lose"))
    assert status == 1, said
    assert re.search(
        "hybridtrain: host 1 of 2, [0-9.]+, is lost with its node, or Ray's actor", said
    )
    assert "is lost with host 1" in said
    assert_nothing_is_left()


@marked
def test_a_lost_host_comes_back(cluster: str, tmp_path: Path) -> None:
    status, said = ended(started(cluster, tmp_path, "strategy.on_failure=restart", how="lose"))
    assert status == 0, said
    assert said.count("host 1 of 2: 1 worker, relay to ") == 2 and "is lost with its node" in said
    assert summary(tmp_path / "run")["samples"] == 2 * N
    assert_nothing_is_left()


@marked
def test_a_host_of_a_lost_node_comes_back_on_another(tmp_path: Path) -> None:
    """The whole node is killed, with Ray's own processes there; a third one has room."""
    with two_nodes() as made:
        process = started(made.address, tmp_path, "strategy.on_failure=restart", how="wait")
        wait_for(tmp_path / "actor", process)
        lost = _node_with(int((tmp_path / "actor").read_text()), made)
        made.remove_node(lost, allow_graceful=False)
        made.add_node(num_cpus=2)
        status, said = ended(process)
    assert status == 0, said
    assert said.count("host 1 of 2: 1 worker, relay to ") == 2 and "is lost with its node" in said
    assert summary(tmp_path / "run")["samples"] == 2 * N
    assert_nothing_is_left()


@marked
def test_ctrl_c_ends_all_hosts_and_saves(cluster: str, tmp_path: Path) -> None:
    process = started(cluster, tmp_path, "trainer.max_epochs=100000")
    wait_for(tmp_path / "seen", process)
    process.send_signal(signal.SIGINT)
    status, said = ended(process)
    assert status == 128 + signal.SIGINT, said
    assert (tmp_path / "run" / "interrupted.ckpt").exists(), said
    assert_nothing_is_left()


@marked
def test_more_hosts_than_nodes_is_one_line(cluster: str, tmp_path: Path) -> None:
    status, said = ended(started(cluster, tmp_path, "trainer.num_nodes=3"))
    assert status == 2, said
    assert "trainer.num_nodes=3 was given, each with {'CPU': 1, 'GPU': 0}, and Ray" in said
