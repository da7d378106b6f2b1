"""Real processes that hang, in many ways: named, shown, killed, and nobody else held up."""

from __future__ import annotations

import code
import ctypes
import os
import pdb
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hybridtrain.engine.monitoring.hang_detector import (
    Doing,
    HangTimeout,
    Heartbeat,
    heartbeat_file,
)
from hybridtrain.engine.monitoring.watchdog import CpuWaits, Watchdog, _excuse
from hybridtrain.engine.policies import WaitForAll
from hybridtrain.engine.protocol.messages import Gather, Gone, Push, Released, Stop
from hybridtrain.engine.server.server import ParameterServer
from hybridtrain.engine.worker.client import Client
from hybridtrain.engine.worlds.channel import Channel, channel_pair
from hybridtrain.engine.worlds.process_world import ProcessWorld
from hybridtrain.engine.worlds.start_workers import WorkerProcess
from hybridtrain.engine.worlds.worker_exit import WorkerDied
from tests.picking import by_default
from tests.worlds.test_world import wait_until

LIMIT_S = 1.0


def watched(n_workers: int, said: list[str], limit_s: float | None = LIMIT_S) -> ProcessWorld:
    watchdog = Watchdog(HangTimeout(limit_s), said.append)
    return ProcessWorld(
        ParameterServer(WaitForAll(), n_workers), n_workers, grace_s=1.0, watchdog=watchdog
    )


def train(client: Client) -> None:
    """Some steps, long enough to be seen."""
    for _ in range(3):
        client.heartbeat.beat(Doing.STEP)
        time.sleep(LIMIT_S / 4)
    client.heartbeat.beat(Doing.STEP)


def oversleep() -> None:
    time.sleep(300)


def oversleep_with_the_interpreter_locked() -> None:
    nothing, _writer = os.pipe()
    ctypes.PyDLL(None).read(nothing, ctypes.create_string_buffer(1), 1)


def stop_oneself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hang(client: Client, how: Callable[[], None]) -> None:
    """Worker 1 hangs, worker 0 waits for it."""
    train(client)
    if client.worker == 1:
        how()
    client.gather("end of the epoch", None)


def death(how: Callable[[], None]) -> tuple[str, list[str]]:
    """The obituary, and what was said before."""
    said: list[str] = []
    with pytest.raises(WorkerDied) as caught:
        watched(2, said).run(partial(hang, how=how))
    return str(caught.value), said


@pytest.mark.wide
@pytest.mark.parametrize(
    "how",
    by_default(
        [oversleep, oversleep_with_the_interpreter_locked], oversleep_with_the_interpreter_locked
    ),
)
def test_a_worker_that_hangs_is_named_shown_and_killed(how: Callable[[], None]) -> None:
    obituary, said = death(how)
    assert obituary.startswith("worker 1 (process ")
    assert "hung and was killed: it has shown no sign of life for" in obituary
    assert "in a training step" in obituary
    assert "meanwhile worker 0 waits for all in 'end of the epoch'" in obituary
    warning, verdict = said
    assert "may hang" in warning and "it is killed after 1 s (hang_timeout_s)" in warning
    assert "hangs: it has shown no sign of life" in verdict
    for text in said:
        assert f"in {how.__name__}" in text, "the innermost call of the user's own code"
        assert "test_watchdog.py" in text


def test_a_worker_that_was_stopped_is_given_up_as_well_and_it_is_said_how_to_let_it_go_on() -> None:
    obituary, said = death(stop_oneself)
    assert "stopped by a signal (kill -CONT " in said[0]
    assert "hung and was killed" in obituary


@pytest.mark.wide
def test_a_stopped_worker_that_is_owed_a_large_answer_does_not_hold_up_the_others(
    tmp_path: Path,
) -> None:
    payload = bytes(3 << 20)  # more than any socket holds

    def body(client: Client) -> None:
        train(client)
        if client.worker == 1:
            client.line.send(Gather("large", payload))
            stop_oneself()
        client.line.send(Gather("large", payload))
        client.line.receive()
        assert client.stats()["workers"] == 3, "the server answers"
        (tmp_path / str(client.worker)).touch()
        client.gather("end", None)

    with pytest.raises(WorkerDied, match=r"worker 1 .* hung and was killed"):
        watched(3, []).run(body)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "2"]


def test_a_slow_reader_gets_all_of_a_large_answer() -> None:
    def body(client: Client) -> int:
        client.line.send(Gather("large", bytes(3 << 20)))
        time.sleep(0.5 * client.worker)
        reply: Any = client.line.receive()[0]
        return sum(map(len, reply.payloads))

    assert watched(2, []).run(body) == [6 << 20] * 2


@pytest.mark.slow
def test_a_worker_in_a_debugger_is_waited_for() -> None:
    reads, writes = os.pipe()

    def body(client: Client) -> str:
        train(client)
        if client.worker == 0:
            for _ in range(10):  # worker 0 shows signs of life
                client.heartbeat.beat(Doing.STEP)
                time.sleep(LIMIT_S / 4)
            os.write(writes, b"c\n")
            return ""
        before = time.monotonic()
        with os.fdopen(reads) as typed, Path(os.devnull).open("w") as screen:
            pdb.Pdb(stdin=typed, stdout=screen).set_trace()
            after = time.monotonic()
        return "waited" if after - before > 2 * LIMIT_S else "the debugger did not stop"

    said: list[str] = []
    try:
        assert watched(2, said).run(body) == ["", "waited"]
    finally:
        os.close(reads)
        os.close(writes)
    assert said == ["worker 1 stands in a debugger; it is waited for"]


@pytest.mark.parametrize(
    ("file", "excused"),
    [(code.__file__, True), (pdb.__file__, True), ("/home/me/code.py", False)],
)
def test_only_pythons_own_console_counts_as_a_debugger(file: str, excused: bool) -> None:
    stacks = f'  File "/home/me/train.py", line 1 in fit\n  File "{file}", line 1 in run'
    assert (_excuse(os.getpid(), stacks) is not None) == excused


@pytest.mark.wide
def test_a_worker_that_has_done_its_job_and_does_not_leave_is_killed_and_its_result_counts() -> (
    None
):
    def body(client: Client) -> int:
        train(client)
        if client.worker == 1:
            # Then it is not the first time, which may take longer.
            client.heartbeat.beat(Doing.ENDING)
            threading._register_atexit(oversleep)  # type: ignore[attr-defined]
        return client.worker

    said: list[str] = []
    assert watched(2, said).run(body) == [0, 1]
    assert "worker 1" in said[-1] and " hangs: " in said[-1] and "ending" in said[-1]


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel must count it")
def test_who_shares_a_core_is_known_to_have_waited_for_it() -> None:
    core = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"
    busy = [subprocess.Popen([sys.executable, "-S", "-c", code]) for _ in range(3)]
    waits = CpuWaits()
    try:
        assert waits.since(busy[0].pid) == 0.0
        waited: list[float] = []
        wait_until(lambda: sum(waited) > 0.05 or waited.append(waits.since(busy[0].pid)))
    finally:
        for each in busy:
            each.kill()
            each.wait()


def test_what_a_waiting_worker_hears_unasked_leaves_it_waiting() -> None:
    ours, theirs = map(Channel, channel_pair())
    process: Any = None
    worker = WorkerProcess(0, ours, process, -1, Heartbeat())
    for answer, unasked in ((Released(3), Gone(1, 2)), (Stop(now=True), Stop())):
        worker.request = Push(0, 1.0)
        worker.send(unasked)
        assert worker.asked == "its release"
        worker.send(answer)
        assert worker.asked == ""
    ours.close()
    theirs.close()


@pytest.mark.slow
def test_without_a_time_nobody_is_given_up() -> None:
    def body(client: Client) -> str:
        train(client)
        time.sleep(2 * LIMIT_S)
        return "alive"

    assert ProcessWorld(ParameterServer(WaitForAll(), 1), 1).run(body) == ["alive"]


def test_a_pulse_tells_the_other_side_what_is_done_and_how_often() -> None:
    fd = heartbeat_file()
    theirs, mine = Heartbeat(os.dup(fd)), Heartbeat(fd)
    assert (mine.doing, mine.beats) == (Doing.STARTING, 0)
    theirs.beat(Doing.STEP)
    theirs.beat(Doing.CHECKPOINT)
    assert (mine.doing, mine.beats) == (Doing.CHECKPOINT, 2)
    theirs.close()
    mine.close()


def test_a_pulse_that_nobody_watches_beats_as_well() -> None:
    heartbeat = Heartbeat()
    heartbeat.beat(Doing.STEP)
    assert heartbeat.beats == 1
    heartbeat.close()
