"""A process that has imported everything and trains nothing: each run is a fork of it.

Importing torch and Lightning takes seconds, a run a fraction of one. And whatever a run leaves
behind in its process (a process group, environment variables, patched functions) ends with it.

Requests come as lines of JSON on the standard input, answers go the same way to the standard
output. A run that takes longer than its limit is asked for the stacks of all its processes
(``SIGUSR1``, in the run's log), then killed with all of them.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

import hybridtrain  # noqa: F401  (before Lightning: HYBRIDTRAIN_LIGHTNING may name a package)
from tests.parity.cases import CASES
from tests.parity.play import Run, play
from tests.support.warm_up import warm_up

_POLL_S = 0.01
# What torch and Lightning import as late as in a run, so that not each fork has to.
_IMPORTED_LATE = (
    "fsspec.implementations.chained",
    "multiprocessing.popen_fork",
    "multiprocessing.synchronize",
    "omegaconf",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
)


@dataclass(frozen=True, slots=True)
class _Child:
    request: dict[str, Any]
    began_s: float


def serve(jobs: int, answers: int) -> None:
    """Until the standard input ends: at most ``jobs`` runs at a time."""
    waiting: list[dict[str, Any]] = []
    running: dict[int, _Child] = {}
    reader = os.fdopen(0, "rb", buffering=0)
    pending, is_open = b"", True
    while is_open or running:
        timeout = _POLL_S if running or waiting else None
        if is_open and select.select([reader], [], [], timeout)[0]:
            data = reader.read(1 << 16)
            is_open = bool(data)
            *lines, pending = (pending + data).split(b"\n")
            waiting += [json.loads(line) for line in lines]
        while is_open and waiting and len(running) < jobs:
            request = waiting.pop(0)
            running[_fork(request)] = _Child(request, time.monotonic())
        for pid in list(running):
            if (answer := _look_after(pid, running[pid])) is not None:
                del running[pid]
                os.write(answers, json.dumps(answer).encode() + b"\n")
        if not is_open:
            for pid in running:
                _kill(pid)


def _fork(request: dict[str, Any]) -> int:
    if (pid := os.fork()) == 0:
        _run(request)
    return pid


def _run(request: dict[str, Any]) -> NoReturn:
    status = 1
    try:
        os.setsid()
        folder = Path(request["folder"])
        folder.mkdir(parents=True)
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        run = Run(request["strategy"], request["workers"], request["where"])
        play(CASES[request["case"]], run, folder)
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(status)


def _look_after(pid: int, child: _Child) -> dict[str, Any] | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    seconds = time.monotonic() - child.began_s
    if done:
        _kill(pid)  # what it has left behind
        how = "ok" if status == 0 else f"status {os.waitstatus_to_exitcode(status)}"
    elif seconds > child.request["limit_s"]:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGUSR1)
        time.sleep(0.5)
        _kill(pid)
        os.waitpid(pid, 0)
        how = f"hung for {seconds:.0f} s"
    else:
        return None
    answer = {"id": child.request["id"], "how": how, "seconds": seconds}
    (Path(child.request["folder"]) / "answer.json").write_text(json.dumps(answer))
    return answer


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    torch.set_num_threads(1)
    channel = os.dup(1)
    os.dup2(2, 1)  # whatever prints must not disturb the answers
    os.set_inheritable(channel, False)
    for name in _IMPORTED_LATE:
        importlib.import_module(name)
    warm_up()
    serve(int(sys.argv[1]), channel)
