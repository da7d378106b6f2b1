"""Runs a function in one forked process for each host, on this machine."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

LIMIT_S = 90.0


@dataclass(frozen=True)
class Host:
    """What became of a host: its result, or nothing; what it printed."""

    result: Any
    said: str
    status: int


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Pids(dict[int, int]):
    """The hosts' processes, by number."""

    def __init__(self, start: Callable[[int], int]) -> None:
        super().__init__()
        self._start = start

    def start(self, host: int) -> None:
        """Start the host's command, also in place of one that has been killed."""
        if host in self:
            os.waitpid(self[host], 0)
        self[host] = self._start(host)


def run_hosts(
    folder: Path,
    body: Callable[[], Any],
    n_hosts: int = 2,
    variables: Mapping[str, str] | None = None,
    meanwhile: Callable[[Pids], object] = lambda pids: None,
    late: int = 0,
) -> list[Host]:
    """Run ``body`` on each host; ``meanwhile`` is called with the hosts' processes.

    ``late``: so many hosts are not started: ``meanwhile`` does it.

    Raises:
        AssertionError: if one does not end in time.
    """
    port = str(free_port())

    def start(host: int) -> int:
        own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": str(host)}
        if (pid := os.fork()) == 0:
            _be_the_host(folder / f"host{host}", {**own, **(variables or {})}, body)
        return pid

    pids = Pids(start)
    for host in range(n_hosts - late):
        pids.start(host)
    meanwhile(pids)
    limit, left, statuses = time.monotonic() + LIMIT_S, dict(pids), {}
    try:
        while left:
            for host, pid in list(left.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    statuses[host] = os.waitstatus_to_exitcode(status)
                    del left[host]
            assert time.monotonic() < limit, {
                host: (folder / f"host{host}" / "log").read_text()[-3000:] for host in left
            }
            time.sleep(0.01)
    finally:
        for pid in left.values():
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [_found(folder / f"host{host}", statuses[host]) for host in range(n_hosts)]


def _found(folder: Path, status: int) -> Host:
    file = folder / "result.pt"
    result = torch.load(file, weights_only=False) if file.exists() else None
    return Host(result, (folder / "log").read_text(), status)


def _be_the_host(folder: Path, variables: dict[str, str], body: Callable[[], Any]) -> None:
    status = 1
    try:
        os.setsid()
        folder.mkdir(parents=True, exist_ok=True)
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout = sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        os.environ.update(variables)
        os.chdir(folder)
        torch.set_num_threads(1)
        torch.save(body(), folder / "result.pt")
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)
