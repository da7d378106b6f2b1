"""Run one ``espeak.py`` process per shard, as many at once as there are cores, with a bar."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hybridtrain.tasks.speech.sources import espeak
from hybridtrain.tasks.speech.sources.espeak import Job

WORKER = Path(espeak.__file__)


def speak_shards(folder: Path, shards: dict[str, list[Job]]) -> dict[str, list[int]]:
    """Write ``folder/name`` for each shard; returns its utterances' lengths in samples, by name.

    Raises ``RuntimeError`` with the engine's message if a process fails. An error or Ctrl-C ends
    all processes.
    """
    processes: list[subprocess.Popen[str]] = []
    with _bar() as bar, ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as pool:
        task = bar.add_task("Speaking the digits", total=sum(map(len, shards.values())))

        def speak(name: str) -> list[int]:
            process = _start(folder / name)
            processes.append(process)
            assert process.stdin and process.stdout and process.stderr
            with process:
                json.dump([asdict(job) for job in shards[name]], process.stdin)
                process.stdin.close()
                lengths = []
                for line in process.stdout:
                    lengths.append(int(line))
                    bar.advance(task)
                errors = process.stderr.read()
            if process.returncode != 0:
                raise RuntimeError(f"espeak-ng failed on {name}: {errors.strip()[-1000:]}")
            return lengths

        try:
            return dict(zip(shards, pool.map(speak, shards), strict=True))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.kill()
            raise


def _start(out: Path) -> subprocess.Popen[str]:
    # -P: the script's own folder holds modules that must not hide others
    command = [sys.executable, "-P", str(WORKER), str(out)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
