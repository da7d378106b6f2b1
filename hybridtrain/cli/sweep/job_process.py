"""The process of one job of a sweep: start it with a clean environment, forward signals.

The job has a process group of its own, so that Ctrl-C reaches the sweep alone; the sweep sends it
on once and waits while the job saves a checkpoint and stops its workers.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import runpy
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from hybridtrain.cli.config_values import overrides_of, quoted
from hybridtrain.cli.exit_status import FAILED, CommandOutcome, interrupted
from hybridtrain.util.anonymous_files import anonymous_descriptor
from hybridtrain.util.files import flush_output
from hybridtrain.worlds.local.signals import ending_signals, restore

RESULT, PARENT = "HYBRIDTRAIN_RESULT", "HYBRIDTRAIN_PARENT"
REPORTS = "HYBRIDTRAIN_REPORTS"  # the job's mailbox, if the sweep listens
ENVIRONMENT: dict[str, str] = {}  # at the start of the command, before any job
FLAGS: list[str] = []  # of the command line, such as --config-dir
_OF_SWEEP = (  # options that its jobs do not get
    *("hydra.mode", "hydra.run.", "hydra.sweep.", "hydra.launcher", "hydra/launcher"),
    *("hydra.sweeper", "hydra/sweeper"),
)


def remember_environment() -> None:
    """Keep the environment that every job starts with."""
    ENVIRONMENT.clear()
    ENVIRONMENT.update(os.environ)


@dataclass(frozen=True, slots=True)
class Job:
    """A job as configured.

    ``total``: of how many, None: not known; ``goes_on``: it has begun before; ``reports``: its
    mailbox, if the sweep listens.
    """

    config: DictConfig
    overrides: tuple[str, ...]
    total: int | None = None
    goes_on: bool = False
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


@dataclass(frozen=True, slots=True)
class JobResources:
    """Where a job runs: its cores and GPUs (empty: all), and the file that it prints to, if any."""

    cores: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()
    output: Path | None = None


@dataclass(frozen=True, slots=True)
class JobProcess:
    """A job's process; ``code`` returns its exit status, or None while it runs."""

    pid: int
    code: Callable[[], int | None]
    result: BinaryIO  # the job writes its outcome here

    def send(self, signum: int) -> None:
        """Ctrl-C goes to the job's whole group, as a terminal sends it; others to its process."""
        with contextlib.suppress(OSError):
            if signum in (signal.SIGINT, signal.SIGKILL):
                os.killpg(self.pid, signum)
            else:
                os.kill(self.pid, signum)

    def outcome(self, signals: Sequence[int]) -> CommandOutcome:
        """How the job ended; ``signals``: those that were sent to it."""
        with self.result as file:
            file.seek(0)
            said = file.read()
        outcome, code = CommandOutcome(**json.loads(said)) if said else None, self.code()
        if signals and (outcome is None or outcome.exit):
            directory = None if outcome is None else outcome.directory
            return replace(interrupted(signals[0]), directory=directory)
        if outcome is not None:
            return outcome
        how = f"ended with status {code} and no word"
        if code is not None and code < 0:
            code, how = FAILED, f"was killed by {signal.Signals(-code).name}"
        return CommandOutcome(exit=code or FAILED, error=f"its process {how}")


def start(job: Job, resources: JobResources, forks: bool) -> JobProcess:
    """Start a job: the same command with this job's overrides, in a process of its own.

    ``forks``: in a forked child, which shares this process' imports; else in a fresh interpreter.
    """
    result = open(anonymous_descriptor(), "r+b")  # noqa: PTH123, SIM115  (it has no path)
    environment = ENVIRONMENT | {RESULT: str(result.fileno()), PARENT: str(os.getpid())}
    environment |= {REPORTS: job.reports} if job.reports else {}
    gpus = {"CUDA_VISIBLE_DEVICES": ",".join(resources.gpus)} if resources.gpus else {}
    environment, arguments = environment | gpus, _arguments(job)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_on_cores(resources.cores))
        output = resources.output and stack.enter_context(resources.output.open("ab"))
        if forks:
            fork = multiprocessing.get_context("fork")
            forked = fork.Process(target=_forked_main, args=(arguments, environment, output))
            flush_output()
            with _blocked(ending_signals()):  # ours are not the child's
                forked.start()
            assert forked.pid is not None
            _in_group(forked.pid)
            return JobProcess(forked.pid, lambda: forked.exitcode, result)
        streams: dict[str, Any] = {"stdout": output, "stderr": output}
        child = subprocess.Popen(
            [sys.executable, "-m", "hybridtrain", *arguments],
            env=environment,
            process_group=0,
            pass_fds=(result.fileno(),),
            **streams,
        )
        return JobProcess(child.pid, child.poll, result)


@contextlib.contextmanager
def _blocked(signals: Iterable[int]) -> Iterator[None]:
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


def _forked_main(
    arguments: list[str], environment: dict[str, str], output: BinaryIO | None
) -> None:
    _in_group(0)
    for signum in ending_signals():
        signal.signal(signum, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    if output is not None:
        for fd in {1, 2, *(x.fileno() for x in (sys.stdout, sys.stderr) if x is not None)}:
            os.dup2(output.fileno(), fd)
    GlobalHydra.instance().clear()  # the sweep's
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ending_signals())  # one may have come since the fork
    sys.argv[1:] = arguments
    runpy.run_module("hybridtrain", run_name="__main__")  # it ends by SystemExit


@contextlib.contextmanager
def _on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Let a child that is started meanwhile inherit these cores; empty: all."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _arguments(job: Job) -> list[str]:
    """Of the command that runs a job, or goes on with it: what went wrong has been tried."""
    given = job.config.hydra
    kept = [x for x in given.overrides.hydra if not x.lstrip("+").startswith(_OF_SWEEP)]
    own = [*FLAGS, *kept, "hydra.mode=RUN", f"hydra.job.num={job.number}"]
    if job.goes_on:
        return [*own, quoted("resume", job.folder), "faults=null"]
    return [*own, *overrides_of(given), quoted("hydra.run.dir", job.folder)]


def command_of(overrides: Sequence[str]) -> str:
    """The command that runs a job with these overrides alone, to be typed in a shell."""
    return shlex.join(["python", "-m", "hybridtrain", *FLAGS, *overrides])


def report(outcome: CommandOutcome) -> None:
    """In a job's process: send the outcome to the sweep."""
    if fd := ENVIRONMENT.get(RESULT):
        os.write(int(fd), json.dumps(asdict(outcome)).encode())


def adopt() -> None:
    """In a job's process: end with the sweep, and hide its variables from children."""
    os.environ.pop(RESULT, None)
    if parent := os.environ.pop(PARENT, None):
        from hybridtrain.worlds.local.parent_death import die_with_parent

        die_with_parent(int(parent))


def _in_group(pid: int) -> None:
    """Give the process its own group; parent and child both call it, whichever is first."""
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)


@contextlib.contextmanager
def passing_on(running: Iterable[JobProcess]) -> Iterator[list[int]]:
    """Forward the signals that would end the sweep to all jobs that run; none outlives the block.

    The third signal kills them. Yields the list of signals so far.
    """
    seen: list[int] = []

    def pass_on(signum: int, _: FrameType | None) -> None:
        seen.append(signum)
        for job in list(running):
            job.send(signal.SIGKILL if len(seen) > 2 else signum)

    before = {x: signal.signal(x, pass_on) for x in ending_signals()}
    try:
        yield seen
    finally:
        for job in running:
            job.send(signal.SIGKILL)
        restore(before)
