"""A Jupyter kernel, as a notebook has it: cells run in a process that goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

LIMIT_S = 100.0  # for a cell


class Kernel:
    """A started kernel. ``pid``: of its process; ``said``: all messages below cells so far."""

    def __init__(self, manager: Any, client: Any) -> None:
        self._manager, self._client = manager, client
        self.pid: int = manager.provisioner.pid
        self.said: list[dict[str, Any]] = []

    def run(self, cell: str) -> str:
        """Run a cell; "ok", or the name of the error that it has raised."""
        return self.end(self.begin(cell))

    def begin(self, cell: str) -> str:
        """Send a cell without waiting; the number of the request."""
        return self._client.execute(cell, allow_stdin=False)

    def end(self, request: str) -> str:
        """Wait until it has run; as ``run``."""
        idle, reply = False, dict[str, Any]()
        while not idle:
            self.said.append(self._client.get_iopub_msg(timeout=LIMIT_S))
            state = self.said[-1]["content"].get("execution_state")
            idle = state == "idle" and _answers(self.said[-1], request)
        while not _answers(reply, request):
            reply = self._client.get_shell_msg(timeout=LIMIT_S)
        return reply["content"].get("ename", reply["content"]["status"])

    def interrupt(self) -> None:
        """Press the button that interrupts the cell."""
        self._manager.interrupt_kernel()

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        """The contents of the messages of these kinds."""
        return [each["content"] for each in self.said if each["msg_type"] in kinds]

    @property
    def printed(self) -> str:
        """The standard output of all cells."""
        streams = self.of_kind("stream")
        return "".join(each["text"] for each in streams if each["name"] == "stdout")

    def children(self) -> list[int]:
        """Its child processes."""
        tasks = Path(f"/proc/{self.pid}/task").glob("*/children")
        return [int(pid) for children in tasks for pid in _read(children).split()]


def _answers(message: dict[str, Any], request: str) -> bool:
    return message.get("parent_header", {}).get("msg_id") == request


def shared_memory(pid: int | str) -> list[str]:
    """Shared memory of this package that the process has mapped or open."""
    maps = [line for line in _read(Path(f"/proc/{pid}/maps")).splitlines() if "rw-s" in line]
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            maps.append(str(link.readlink()))
    return [line for line in maps if "memfd:hybridtrain" in line]


def _read(path: Path) -> str:
    with suppress(OSError):  # a thread that has ended
        return path.read_text()
    return ""


@contextmanager
def kernel(folder: Path) -> Iterator[Kernel]:
    """A new kernel, which works in this folder."""
    from jupyter_client.manager import KernelManager

    manager: Any = KernelManager(connection_file=str(folder / "connection.json"))
    kept = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}  # it asks for that
    own = {"PYTHONPATH": str(Path(__file__).parents[2]), "IPYTHONDIR": str(folder / ".ipython")}
    manager.start_kernel(cwd=str(folder), env={**kept, **own})
    client = manager.blocking_client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=LIMIT_S)
        yield Kernel(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
