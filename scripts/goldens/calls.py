"""Command lines, each in a process of its own with a limit, and what they print and leave."""

from __future__ import annotations

import gc
import importlib
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trials.apart import Ending, members, run_apart

ROOT = Path(__file__).parents[2]
LIMIT_S = 240.0  # a run takes one or two seconds; this is for machines that are busy


@dataclass
class Said:
    """The outcome of a command line."""

    status: int | None
    out: str
    err: str
    left: list[str]

    @property
    def well(self) -> dict[str, Any]:
        """The compared part of the outcome of a command that has to succeed."""
        found: dict[str, Any] = {"status": self.status, "left": self.left}
        return found | ({"error": (self.err or self.out)[-300:]} if self.status else {})


def preload() -> None:
    """Import the package once, so that what is forked need not."""
    import hybridtrain

    if Path(hybridtrain.__file__).parents[1] != ROOT:
        sys.exit(f"hybridtrain was imported from {hybridtrain.__file__}, which is not in {ROOT}")
    for found in pkgutil.walk_packages(hybridtrain.__path__, "hybridtrain."):
        if not found.name.endswith("__main__"):
            with suppress(Exception):  # an extra that is not installed
                importlib.import_module(found.name)
    for name in ("goldens.tasks", "sklearn.datasets", "hydra._internal.hydra"):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is forked then neither looks through these objects nor copies their pages


def call(module: str, *arguments: str, folder: Path, limit_s: float = LIMIT_S) -> Said:
    """``python -m module arguments`` in ``folder``, forked from this process."""
    return python(lambda: _run(module, arguments), folder, limit_s)


def python(trial: Callable[[], Any], folder: Path, limit_s: float = LIMIT_S) -> Said:
    """Run a function in ``folder``; what it returns is the status."""
    ending = apart(lambda place: _in(folder, trial, place / "stderr"), limit_s)
    if ending.result is None:
        why = "did not end and was killed" if ending.status is None else ending.output
        return Said(ending.status or -1, ending.output, why, _held(ending))
    status, err = ending.result
    return Said(status, ending.output, err, _held(ending))


def apart(trial: Callable[[Path], Any], limit_s: float) -> Ending:
    """As ``run_apart``; whatever ends this process ends the trial as well."""
    parent, sessions = os.getppid(), set()

    def during(session: int, folder: Path) -> bool:
        sessions.add(session)
        return os.getppid() == parent

    try:
        return run_apart(trial, limit_s, during)
    except BaseException:
        for pid in [pid for session in sessions for pid in members(session)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raise


def _in(folder: Path, trial: Callable[[], Any], err: Path) -> tuple[int, str]:
    os.chdir(folder)
    file = os.open(err, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 2)
    status = trial()
    sys.stdout.flush()
    sys.stderr.flush()
    return int(status or 0), err.read_text(errors="replace")


def _run(module: str, arguments: tuple[str, ...]) -> int:
    sys.argv = [module, *arguments]
    sys.modules.pop(module, None)  # or runpy warns that it has been imported
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _held(ending: Ending) -> list[str]:
    """Processes, shared memory and temporary files; not the files in its folder."""
    found = [entry for entry in ending.left if not entry.startswith("run/")]
    return [entry.partition(" ")[0].rpartition("/")[0] or "a process" for entry in found]


def fresh(*command: str, folder: Path, limit_s: float = 2 * LIMIT_S) -> Said:
    """``python command`` in an interpreter that has imported nothing."""
    places = os.pathsep.join(str(place) for place in (ROOT, ROOT / "scripts"))
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": places},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=limit_s)
    except BaseException as failure:
        for pid in members(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()
        if isinstance(failure, subprocess.TimeoutExpired):
            return Said(-1, "", "did not end and was killed", [])
        raise
    return Said(process.returncode, out, err, ["a process" for _ in members(process.pid)])
