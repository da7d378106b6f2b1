"""One measured run: a function called in a fresh process tree, and ended with all of it.

The process is a fork of a server that has imported what all need (``preload.py``). Its session is
its own, so whatever it leaves running ends with it. What it prints goes to a file, which is shown
where it fails.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import hybridtrain
from hybridtrain.errors import UserError

THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
_LAST_LINES = 12
_TO_TIDY_UP_S = 5.0


@dataclass(frozen=True, slots=True)
class Job:
    """``function``: ``"module:name"``, of a module that the processes can import."""

    label: str
    function: str
    arguments: dict[str, Any] = field(default_factory=dict)


class RunFailed(Exception):
    """A run has raised, died or taken too long. The message ends with its last lines."""


class Runner:
    """Starts the processes.

    Args:
        limit_s: how long a run may take.
    """

    def __init__(self, limit_s: float = 120.0) -> None:
        os.environ |= THREADS | {"PYTHONPATH": _search_path()}  # the server reads them at its start
        self._limit_s = limit_s
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["benchmarks.preload"])

    def run(self, job: Job) -> Any:
        """Run the job in a process of its own; return its result.

        Raises:
            UserError: what the function has raised as such: something is not installed.
            RunFailed: if it fails otherwise.
        """
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "log")
            here, there = self._context.Pipe()
            process = self._context.Process(target=_run, args=(job, folder, str(log), there))
            process.start()
            there.close()
            try:
                found = self._await(job, here, log)
                process.join(_TO_TIDY_UP_S)
                return found
            finally:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid or 0, signal.SIGKILL)
                process.kill()
                process.join()
                here.close()

    def _await(self, job: Job, here: Connection, log: Path) -> Any:
        try:
            how, what = here.recv() if here.poll(self._limit_s) else ("late", "")
        except EOFError:
            how, what = "died", ""
        match how:
            case "returned":
                return what
            case "refused":
                raise UserError(what)
            case "late":
                what = f"it took more than {self._limit_s:g} s"
            case "died":
                what = "its process died"
        last = log.read_text(errors="replace").splitlines()[-_LAST_LINES:] if log.exists() else []
        raise RunFailed("\n".join([f"{job.label}: {what}", *last]))


def _search_path() -> str:
    """Where this package and hybridtrain are found, by processes with another main script too."""
    roots = [Path(__file__).parents[1], Path(hybridtrain.__file__).parents[1]]
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(dict.fromkeys([*map(str, roots), *filter(None, given)]))


def _run(job: Job, folder: str, log: str, there: Connection) -> None:
    os.setsid()
    os.chdir(folder)  # whatever it leaves goes with it
    sys.stdout.flush()
    sys.stderr.flush()
    with Path(log).open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        there.send(("returned", call(job)))
    except UserError as error:
        there.send(("refused", str(error)))
    except BaseException:
        there.send(("raised", traceback.format_exc(limit=-4)))


def call(job: Job) -> Any:
    """Call the function here."""
    module, _, name = job.function.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function(**job.arguments)
