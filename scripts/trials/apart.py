"""Runs each trial in a process session of its own, forked from this one, and looks what it leaves.

Importing torch and Lightning takes seconds, a trial hardly one; and what it patches ends with it.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_SHARED_MEMORY = Path("/dev/shm")
_NAMES = ("torch_", "psm_", "hybrid")
_POLL_S = 0.02
_GONE_S = 2.0  # the last processes may take so long to disappear


@dataclass
class Ending:
    """How a trial ended."""

    result: Any = None  # what it returned, if it came to that
    status: int | None = None  # its exit status; None: it did not end, and was killed
    wall_s: float = 0.0
    output: str = ""
    seen: Any = None  # what ``after`` has found in its folder
    left: list[str] = field(default_factory=list)  # processes, shared memory, files


def run_apart(
    trial: Callable[[Path], Any],
    limit_s: float,
    during: Callable[[int, Path], bool] = lambda session, folder: True,
    after: Callable[[Path], Any] = lambda folder: None,
) -> Ending:
    """Run ``trial(folder)``; its exceptions are printed, and are then no result.

    ``during(session, folder)`` is called again and again; once it is false the trial is given up.
    ``after(folder)`` looks at what it has left there.
    """
    with tempfile.TemporaryDirectory(prefix="trial-") as name:
        folder = Path(name)
        for part in ("run", "tmp"):
            (folder / part).mkdir()
        began_s, shared = time.monotonic(), _shared_memory()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _be(trial, folder)
        status = _wait(pid, began_s + limit_s, lambda: during(pid, folder / "run"))
        ending = Ending(_result(folder), status, time.monotonic() - began_s)
        ending.left = _left_processes(pid) + _left_memory(shared) + _left_files(folder)
        ending.seen = after(folder / "run")
        ending.output = (folder / "output").read_text(errors="replace")
    return ending


def _be(trial: Callable[[Path], Any], folder: Path) -> None:
    """The trial's process."""
    status = 1
    try:
        os.setsid()
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")
        out = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number in (1, 2):
            os.dup2(out, number)
        result = trial(folder / "run")
        (folder / "result").write_bytes(pickle.dumps(result))
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait(pid: int, deadline_s: float, hopeful: Callable[[], bool]) -> int | None:
    while time.monotonic() < deadline_s and hopeful():
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(_POLL_S)
    _kill_session(pid)
    os.waitpid(pid, 0)
    return None


def _result(folder: Path) -> Any:
    path = folder / "result"
    return pickle.loads(path.read_bytes()) if path.is_file() else None


def members(session: int) -> dict[int, str]:
    """The living processes of a session, and their names."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            head, tail = path.read_text().rsplit(")", 1)
            state, _, _, its_session = tail.split()[:4]
            if int(its_session) == session and state not in "ZX":
                found[int(path.parent.name)] = head.partition("(")[2]
    return found


def _left_processes(session: int) -> list[str]:
    deadline_s = time.monotonic() + _GONE_S
    while (found := members(session)) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    _kill_session(session)
    return [f"process {pid} ({name})" for pid, name in found.items()]


def _kill_session(session: int) -> None:
    for pid in members(session):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _shared_memory() -> set[str]:
    return {path.name for path in _SHARED_MEMORY.glob("*")}


def _left_memory(before: set[str]) -> list[str]:
    """Segments of the names that Python and torch give, that were not there before.

    What goes away by itself is another's.
    """
    deadline_s = time.monotonic() + _GONE_S
    while (found := _ours(unheld(before))) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    return found


def _ours(names: list[str]) -> list[str]:
    return [f"/dev/shm/{name}" for name in names if name.startswith(_NAMES)]


def unheld(before: set[str]) -> list[str]:
    """Segments beside those of before that no living process has: with others, others are at work.

    Args:
        before: names in ``/dev/shm``.
    """
    found = {}
    for path in _SHARED_MEMORY.glob("*"):
        with suppress(OSError):
            found[path.stat().st_ino] = path.name
    found = {number: name for number, name in found.items() if name not in before}
    for maps in Path("/proc").glob("[0-9]*/maps") if found else ():
        with suppress(OSError):
            for line in maps.read_text().splitlines():
                found.pop(int(line.split()[4]), None)
            for fd in (maps.parent / "fd").iterdir():
                found.pop(fd.stat().st_ino, None)
    return sorted(found.values())


def _left_files(folder: Path) -> list[str]:
    found = [path for path in (folder / "tmp").rglob("*") if not path.is_dir()]
    found += (folder / "run").rglob(".*")
    return [str(path.relative_to(folder)) for path in found]
