"""Whole jobs, as ``python -m hybridtrain`` runs them, in an interpreter of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path


class Failed(Exception):
    """The command has failed. The message has what it has printed."""


@dataclass(frozen=True)
class Run:
    """One run's figures."""

    strategy: str
    samples_per_s: float
    wall_s: float
    metrics: dict[str, float]
    took_s: float  # from the command to its end


def one_run(strategy: str, overrides: list[str]) -> Run:
    """Run the job once in a process of its own.

    Raises:
        Failed: with its output.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hybridtrain", f"strategy={strategy}", *overrides]
        command.append(f"hydra.run.dir={folder}/run")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        summary = Path(folder, "run", "summary.json")
        if done.returncode != 0 or not summary.is_file():
            raise Failed(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        content = json.loads(summary.read_text())
    took_s = time.monotonic() - began
    rate, wall_s = content["samples_per_s"], content["wall_s"]
    return Run(strategy, rate, wall_s, content["metrics"], took_s)
