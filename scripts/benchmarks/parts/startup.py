"""From the command to the end of the first training step, everything included.

One script (``jobs/first_step.py``), started as a user starts it: a new interpreter, imports,
Trainer, worker processes, the first step. Lightning's ``ddp`` runs the script once for each rank,
which is what its documentation recommends; ``ddp_fork`` does not, but cannot be used with a GPU.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from benchmarks.frame import Frame
from benchmarks.jobs import first_step
from benchmarks.rows import NOTHING_ASKED, Goal, Row, Skipped
from benchmarks.runs import Job

WORKERS = 4
_POLL_S = 0.002


def rows(frame: Frame) -> Iterator[Row | Skipped]:
    """Ours against both ways of starting ranks."""
    workers = 2 if frame.options.quick else WORKERS
    work = f"command to first step, {workers} workers"
    if not frame.options.quick and frame.options.wants(work):
        frame.run(_job("hybrid", workers), f"{work}, warm-up")  # files come from the disk once
    against = [(_job("ddp_fork", workers), NOTHING_ASKED)]
    if not frame.options.quick:
        against.insert(0, (_job("ddp", workers), Goal(1.0, 0.6, of="time")))
    yield from frame.alternate(work, _job("hybrid", workers), against, unit="s", per=1.0)


def _job(strategy: str, workers: int) -> Job:
    label = strategy if strategy == "hybrid" else f"Lightning {strategy}"
    arguments = {"strategy": strategy, "workers": workers}
    return Job(label, "benchmarks.parts.startup:first_step_s", arguments)


def first_step_s(strategy: str, workers: int) -> float:
    """Seconds, from starting the command."""
    place = Path("first").absolute()
    command = [sys.executable, first_step.__file__, strategy, str(workers), str(place)]
    began = time.monotonic()
    process = subprocess.Popen(command, start_new_session=True)
    try:
        while not place.exists():
            if process.poll() is not None and not place.exists():
                raise RuntimeError(f"the command ended with {process.returncode} and no step")
            time.sleep(_POLL_S)
        return float(place.read_text()) - began
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
