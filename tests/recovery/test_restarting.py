"""Real processes that come back, without Lightning: several at once, signals, no process left."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridtrain.engine.memory import Layout, Store
from hybridtrain.engine.monitoring import hang_detector
from hybridtrain.engine.policies import WaitForAll
from hybridtrain.engine.protocol.messages import (
    Average,
    Install,
    Progress,
    Push,
    Saved,
    SavePermission,
    Share,
    Stopped,
)
from hybridtrain.engine.recovery import failure_policy, roster
from hybridtrain.engine.recovery.failure_policy import Judge, OnFailure
from hybridtrain.engine.recovery.roster import Say
from hybridtrain.engine.server.server import ParameterServer
from hybridtrain.engine.updates.serialize import dump
from hybridtrain.engine.worker.client import Client
from hybridtrain.engine.worker.inbox import StopRequested
from hybridtrain.engine.worlds import process_world
from hybridtrain.engine.worlds.process_world import ProcessWorld
from hybridtrain.engine.worlds.signals import Interrupted
from hybridtrain.engine.worlds.worker_exit import WorkerError

STEPS, GRACE_S = 6, 20.0
Then = Callable[[Client, int], None]  # what a worker does before its step


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_policy, "_FIRST_DELAY_S", 0.1)
    monkeypatch.setattr(roster, "_FIRST_DELAY_S", 0.02)


def train(
    client: Client, then: Then, folder: Path, version: int | None = None, averages: bool = False
) -> int:
    """All steps, or from ``version`` on; who stops waits to be told whether to save."""
    client.listeners.on_question(lambda: b"here")
    if version is not None:
        client.group.rejoin()
    w = torch.nn.Parameter(torch.zeros(20))
    layout = Layout.of([("w", w)])
    arena = client.memory.map(Share(layout, averages))
    store = Store(layout, client.n_workers, False, arena, averages)
    optimizer = torch.optim.SGD([w], lr=1.0)
    mine = (dump(optimizer, {id(w): 0}),) if client.worker == 0 and version is None else ()
    client.install(Install(mine))
    client.steps.reach(version or 0)
    client.note(Progress(None, b"here"))
    try:
        while client.steps.version < STEPS:
            client.check_stop()
            then(client, client.steps.version)
            store.gradient(client.worker, layout.slots[0]).fill_(-1.0)
            if averages:
                client.average(Average(1.0))
            client.push(Push(0, 1.0))
    except StopRequested:
        client.note(Stopped())
        while not isinstance(save_permission := client.line.receive()[0], SavePermission):
            pass
        if save_permission.saves:
            (folder / "saved").write_text(str(store.master(layout.slots[0])[0].item()))
            client.note(Saved(True))
        raise
    client.gather("end", None)
    return int(store.master(layout.slots[0])[0])


def run(then: Then, folder: Path, n: int = 3, averages: bool = False) -> list[int]:
    judge = Judge(OnFailure("restart", max_restarts=None))
    world = ProcessWorld(ParameterServer(WaitForAll(), n), n, grace_s=GRACE_S, judge=judge)

    begin = partial(train, then=then, folder=folder, averages=averages)

    def again(told: bytes, version: int) -> Callable[[Client], Any]:
        assert told == b"here"
        return partial(begin, version=version)

    return world.run(begin, again)


def die_once(client: Client, folder: Path) -> None:
    mark = folder / f"died-{client.worker}"
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.wide
def test_two_that_are_lost_at_once_both_come_back_though_one_tells_for_both(tmp_path: Path) -> None:
    def then(client: Client, version: int) -> None:
        if version == 2 and client.worker != 2:
            die_once(client, tmp_path)
        if version == 2 and client.worker == 2:
            time.sleep(0.5)  # both questions come between two steps

    assert run(then, tmp_path) == [STEPS] * 3


@pytest.mark.wide
@pytest.mark.parametrize("averages", [False, True])
def test_if_all_are_lost_in_a_step_the_first_that_is_back_tells_the_others(
    tmp_path: Path, averages: bool
) -> None:
    def then(client: Client, version: int) -> None:
        if version == 2:
            die_once(client, tmp_path)

    assert run(then, tmp_path, averages=averages) == [STEPS] * 3


@pytest.mark.parametrize("alive", [0, 1])
def test_if_all_wait_and_nobody_will_come_the_run_ends_with_a_checkpoint_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alive: int
) -> None:
    def then(client: Client, version: int) -> None:
        if version == 2 and client.worker >= alive:
            die_once(client, tmp_path)

    monkeypatch.setattr(roster.Roster, "_ask", lambda *_: [])  # an error as none is known
    if not alive:
        monkeypatch.setattr(roster, "Start", lambda *_: Say("and nobody does"))
    monkeypatch.setattr(hang_detector, "_DEADLOCK_S", 0.2)
    monkeypatch.setattr(process_world, "_POLL_S", 0.05)
    waits = "worker 0 waits for its release; " if alive else "worker 0 is to come back; "
    with pytest.raises(WorkerError, match=f"stands still.*{waits}worker 1 is to come back"):
        run(then, tmp_path, n=2)
    assert not alive or (tmp_path / "saved").read_text() == "2.0"


def refuse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, times: int) -> None:
    """The system has no process for the next restarts."""
    fork, left = os.fork, [times]

    def forking() -> int:
        if any(tmp_path.glob("died-*")) and left[0]:
            left[0] -= 1
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(os, "fork", forking)


def test_a_restart_waits_until_there_is_a_process_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    refuse(monkeypatch, tmp_path, 2)

    def then(client: Client, version: int) -> None:
        if version == 2 and client.worker == 1:
            die_once(client, tmp_path)

    assert run(then, tmp_path) == [STEPS] * 3
    said = capfd.readouterr().err
    assert said.count("worker 1 cannot be started ([Errno 11] Resource temporarily") == 2


def test_a_run_ends_and_says_why_if_no_process_can_be_started_for_a_lost_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, tmp_path, 99)

    def then(client: Client, version: int) -> None:
        if version == 2 and client.worker == 1:
            die_once(client, tmp_path)

    with pytest.raises(RuntimeError, match=r"could be started for it .tried 6 times.*temporarily"):
        run(then, tmp_path)
    assert (tmp_path / "saved").read_text() == "2.0"


@pytest.mark.parametrize("after_s", [0.05, 0.3], ids=["in the back-off", "before the answer"])
def test_a_signal_during_a_restart_ends_the_run_with_a_checkpoint(
    tmp_path: Path, after_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def then(client: Client, version: int) -> None:
        if version == 2 and client.worker == 1:
            die_once(client, tmp_path)
        if version == 2:
            time.sleep(0.8)  # a long step

    def interrupt() -> None:
        while not (tmp_path / "died-1").exists():
            time.sleep(0.01)
        time.sleep(after_s)
        os.kill(os.getpid(), signal.SIGINT)

    began_s = time.monotonic()
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Interrupted):
        run(then, tmp_path)
    thread.join()
    assert (tmp_path / "saved").read_text() == "2.0"
    assert time.monotonic() - began_s < GRACE_S / 2
