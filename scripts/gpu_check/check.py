"""A check: a function that runs in a process of its own for a limited time, and what it says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_LAST_LINES = 15

RIGHT, WRONG, LEFT_OUT = "yes", "NO", "left out"


@dataclass(frozen=True)
class Found:
    """The result of a check: a line, figures, and whether it is right.

    ``right`` is ``None`` where there was nothing to do.
    """

    text: str
    right: bool | None = True
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """One line of the table.

    Args:
        name: of the line.
        function: ``"module:name"``; it returns a :class:`Found`.
        limit_s: how long it may take.
        arguments: of the function.
        needs: modules without which it cannot run.
        on_gpu: whether it needs one.
    """

    name: str
    function: str
    limit_s: float
    arguments: dict[str, Any] = field(default_factory=dict)
    needs: Sequence[str] = ("torch", "pytorch_lightning")
    on_gpu: bool = True


@dataclass(frozen=True)
class Verdict:
    """The verdict on a check. ``lines``: its last output, where it was not right."""

    name: str
    right: str
    found: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    lines: Sequence[str] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def run(check: Check, folder: Path, limit_s: float) -> Verdict:
    """In a process of its own, in a folder of its own; nothing of it is left running."""
    began = time.monotonic()
    answer, log = folder / "answer.json", folder / "log.txt"
    call = json.dumps([check.function, check.arguments, str(answer)])
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "gpu_check.call", call],
            cwd=folder,
            env=environment(folder),
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = round(time.monotonic() - began, 1)
    last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
    if code is None:
        return Verdict(check.name, WRONG, f"took more than {limit_s:.0f} s", seconds, lines=last)
    if not answer.is_file():
        text = f"failed (exit code {code}){': ' + last[-1] if last else ''}"
        return Verdict(check.name, WRONG, text, seconds, lines=last)
    told = json.loads(answer.read_text(encoding="utf-8"))
    right = {True: RIGHT, False: WRONG, None: LEFT_OUT}[told["right"]]
    kept = last if right == WRONG else ()
    return Verdict(check.name, right, told["text"], seconds, told["figures"], kept)


def environment(folder: Path) -> dict[str, str]:
    """In which our own packages are found, and nothing is written elsewhere."""
    paths = [str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(folder),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "CUDA_CACHE_PATH": str(folder / "cuda"),
    }
