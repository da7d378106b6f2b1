"""Run the jobs of a sweep side by side, as many as cores, memory and GPUs allow, and end them all.

A job that does not run alone gets cores and GPUs of its own, which it sees as all there are: so its
threads and its workers are as many as on a machine of that size.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, ListConfig

from hybridtrain.cli.exit_status import CommandOutcome
from hybridtrain.cli.sweep.job_process import ENVIRONMENT, JobProcess, JobResources, passing_on

AtOnce = int | Literal["auto"]
OUTPUT_FILE = "output.txt"
PATIENCE_S = 30.0  # for jobs to save their checkpoints after Ctrl-C
LEAST_BYTES = 2**30  # what a job is expected to need before one has been measured
_LOOK_S, _MEASURE_S = 0.05, 0.5


@dataclass(frozen=True, slots=True)
class SweepJob:
    """A job as configured; ``total``: of how many, None: not known; ``reports``: its mailbox."""

    config: DictConfig
    overrides: tuple[str, ...]
    total: int | None = None
    reports: str = ""

    @property
    def number(self) -> int:
        """From 0, in the order of the sweep."""
        return int(self.config.hydra.job.num)

    @property
    def folder(self) -> Path:
        """The job's directory."""
        return Path(str(self.config.hydra.sweep.dir)) / str(self.config.hydra.sweep.subdir)

    def __str__(self) -> str:
        of = "" if self.total is None else f" of {self.total}"
        return f"--- job {self.number + 1}{of}"


Start = Callable[[SweepJob, JobResources], JobProcess]


def run_jobs(
    jobs: Iterator[SweepJob],
    start: Start,
    ended: Callable[[SweepJob, CommandOutcome], None],
    at_once: AtOnce,
    listen: Callable[[float], None] = time.sleep,
) -> int:
    """Run all jobs; returns the number of the signal that has ended them, or 0.

    Args:
        jobs: asked for the next one when another may run, so that it can depend on those before.
        ended: called with each job and its outcome as soon as it has ended.
        listen: called between two looks at the processes, with the seconds until the next.
    """
    room, next_job = Room(at_once), next(jobs, None)
    running: dict[JobProcess, tuple[SweepJob, JobResources]] = {}
    with passing_on(running) as signals:
        patience_until_s = float("inf")
        while running or (next_job is not None and not signals):
            while next_job and not signals and (resources := room.take(next_job, running)):
                process = start(next_job, resources)
                running[process] = next_job, resources
                for signum in signals:  # one that came before it was listed
                    process.send(signum)
                next_job = next(jobs, None) if room.has_more(len(running)) else None
            listen(_LOOK_S)
            if signals and patience_until_s == float("inf"):
                patience_until_s = time.monotonic() + PATIENCE_S
            for process in [x for x in running if x.code() is not None]:
                job, resources = running.pop(process)
                room.give_back(resources)
                ended(job, process.outcome(signals))
            if time.monotonic() > patience_until_s:
                for process in running:
                    process.send(signal.SIGKILL)
            if next_job is None and not signals and room.has_more(len(running)):
                next_job = next(jobs, None)
    return signals[0] if signals else 0


class Room:
    """The cores, the memory and the GPUs that jobs share.

    Args:
        at_once: the number of jobs; ``auto``: as many as there is room for.
    """

    def __init__(self, at_once: AtOnce) -> None:
        self._at_once = at_once
        self._cores, self._gpus = list[int](), list[str]()
        self._measured_s, self._largest = 0.0, LEAST_BYTES
        if at_once != 1:
            self._look_around()
        self._n_cores = len(self._cores)

    def _look_around(self) -> None:
        from hybridtrain.engine.memory import limits  # it imports torch

        affinity = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
        quota = limits.container_cores()
        self._cores = sorted(affinity(0))[: None if quota is None else max(1, int(quota))]
        found = limits.named_gpus(ENVIRONMENT)
        found = [str(i) for i in range(len(limits.gpus()))] if found is None else found
        self._gpus = [x for x in found if x]

    def has_more(self, n_running: int) -> bool:
        """Whether there may be room for one more job."""
        return n_running < self._at_once if self._at_once != "auto" else bool(self._cores)

    def take(self, job: SweepJob, running: Collection[JobProcess]) -> JobResources | None:
        """A place for the job beside those that run; None: it has to wait."""
        if self._at_once == 1:
            return None if running else JobResources(reports=job.reports)
        n_gpus = _gpus_of(job.config, len(self._gpus))
        if self._at_once != "auto":
            if len(running) >= self._at_once:
                return None
            n_cores = max(1, self._n_cores // self._at_once)
        else:
            n_cores = min(self._n_cores, _workers_of(job.config, max(1, n_gpus)))
            if running and (n_cores > len(self._cores) or n_gpus > len(self._gpus)):
                return None
            if running and not self._has_memory(running):
                return None
        cores, gpus = _first(self._cores, n_cores), _first(self._gpus, n_gpus)
        job.folder.mkdir(parents=True, exist_ok=True)
        return JobResources(cores, gpus, job.folder / OUTPUT_FILE, job.reports)

    def give_back(self, resources: JobResources) -> None:
        """The job there has ended."""
        self._cores = sorted({*self._cores, *resources.cores})
        self._gpus = [*self._gpus, *resources.gpus]

    def _has_memory(self, running: Collection[JobProcess]) -> bool:
        """Whether those that run may grow to the largest so far, and one more beside them."""
        if time.monotonic() < self._measured_s + _MEASURE_S:
            return False
        self._measured_s = time.monotonic()
        from hybridtrain.engine.memory import limits

        free = limits.available_bytes()
        if free is None:
            return True
        used = memory_of({x.pid for x in running})
        self._largest = max(self._largest, *used.values())
        return free >= self._largest + sum(self._largest - x for x in used.values())


def _first(free: list[Any], n: int) -> tuple[Any, ...]:
    """Take the first ``n``, if there are as many; else none, and the job shares all."""
    taken = tuple(free[:n]) if n <= len(free) else ()
    del free[: len(taken)]
    return taken


def _gpus_of(cfg: DictConfig, present: int) -> int:
    if not present or cfg.trainer.accelerator not in ("auto", "gpu", "cuda"):
        return 0
    devices = cfg.trainer.devices
    if isinstance(devices, ListConfig):
        return len(devices)
    return present if devices in ("auto", -1) else int(devices)


def _workers_of(cfg: DictConfig, n_devices: int) -> int:
    devices = cfg.trainer.devices
    count = devices if isinstance(devices, int) and devices > 0 else n_devices
    return int(count * cfg.strategy.get("workers_per_device", 1))


def memory_of(groups: set[int]) -> dict[int, int]:
    """Bytes that the processes of each group have, what they share counted once."""
    found = dict.fromkeys(groups, 0)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            group = os.getpgid(int(folder.name))
            if group in found:
                lines = (folder / "smaps_rollup").read_text().splitlines()
                sizes = [int(x.split()[1]) for x in lines if x.startswith("Pss:")]
                found[group] += 1024 * sum(sizes)
        except (OSError, ValueError):  # it has ended
            continue
    return found
