"""The process of one job of a sweep: start it with a clean environment, forward signals.

The job has a process group of its own, so that Ctrl-C reaches the sweep alone; the sweep sends it
on once and waits while the job saves a checkpoint and stops its workers.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from hydra.core.utils import run_job
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from hybridtrain.cli.claim import claim_new, release_all
from hybridtrain.cli.config_values import overrides_of
from hybridtrain.cli.exit_status import FAILED, CommandOutcome, guarded, interrupted
from hybridtrain.cli.hydra_config import as_given
from hybridtrain.cli.quiet import hush
from hybridtrain.engine.worlds.signals import ending_signals, restore
from hybridtrain.util.anonymous_files import anonymous_descriptor
from hybridtrain.util.streams import flush_output

RESULT, PARENT = "HYBRIDTRAIN_RESULT", "HYBRIDTRAIN_PARENT"
REPORTS = "HYBRIDTRAIN_REPORTS"  # the job's mailbox, if the sweep listens
ENVIRONMENT: dict[str, str] = {}  # at the start of the command, before any job
FLAGS: list[str] = []  # of the command line, such as --config-dir


def remember_environment() -> None:
    """Keep the environment that every job starts with."""
    ENVIRONMENT.clear()
    ENVIRONMENT.update(os.environ)


@dataclass(frozen=True, slots=True)
class JobResources:
    """Where a job runs: its cores and GPUs (empty: all), and the file that it prints to, if any.

    ``reports``: its mailbox, if the sweep listens.
    """

    cores: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()
    output: Path | None = None
    reports: str = ""


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


def start_forked(
    context: HydraContext, task: TaskFunction, config: DictConfig, resources: JobResources
) -> JobProcess:
    """Start the job in a forked child, which shares this process' imports."""
    result = _result_file()
    arguments = (result.fileno(), os.getpid(), context, task, config, resources)
    child = multiprocessing.get_context("fork").Process(target=_forked_main, args=arguments)
    flush_output()
    signal.pthread_sigmask(signal.SIG_BLOCK, ending_signals())  # ours are not the child's
    try:
        with _on_cores(resources.cores):
            child.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ending_signals())
    assert child.pid is not None
    _in_group(child.pid)
    return JobProcess(child.pid, lambda: child.exitcode, result)


def _forked_main(
    result: int,
    parent: int,
    context: HydraContext,
    task: TaskFunction,
    config: DictConfig,
    resources: JobResources,
) -> None:
    from hybridtrain.engine.worlds.parent_death import die_with_parent

    _in_group(0)
    die_with_parent(parent)
    for signum in ending_signals():
        default = signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL
        signal.signal(signum, default)
    os.environ.clear()
    os.environ.update(_environment(resources))
    if resources.output is not None:
        with resources.output.open("ab") as file:
            for fd in {1, 2, *(x.fileno() for x in (sys.stdout, sys.stderr) if x is not None)}:
                os.dup2(file.fileno(), fd)
    hush()
    overrides = overrides_of(config.hydra)
    sys.argv = [sys.argv[0], *overrides]
    outcome = guarded(lambda: _hydra_job(context, task, config), overrides)
    release_all()
    flush_output()
    _leave(outcome, result)
    sys.exit(outcome.exit)


def _hydra_job(context: HydraContext, task: TaskFunction, config: DictConfig) -> CommandOutcome:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ending_signals())  # one may have come since the fork
    claim_new(Path(str(config.hydra.sweep.dir)) / str(config.hydra.sweep.subdir), "hydra.run.dir")
    done = run_job(
        hydra_context=context,
        task_function=task,
        config=config,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )
    outcome = done._return_value
    if isinstance(outcome, BaseException):
        raise outcome
    assert isinstance(outcome, CommandOutcome)
    return outcome


def start_fresh(config: DictConfig, resources: JobResources) -> JobProcess:
    """Start the job in a fresh interpreter: the same command with this job's overrides."""
    directory = Path(str(config.hydra.sweep.dir)) / str(config.hydra.sweep.subdir)
    result = _result_file()
    fd = result.fileno()
    environment = _environment(resources) | {RESULT: str(fd), PARENT: str(os.getpid())}
    command = _command(config, directory)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_on_cores(resources.cores))
        output = resources.output and stack.enter_context(resources.output.open("ab"))
        streams: dict[str, Any] = {"stdout": output, "stderr": output}
        child = subprocess.Popen(
            command, env=environment, process_group=0, pass_fds=(fd,), **streams
        )
    return JobProcess(child.pid, child.poll, result)


def _result_file() -> BinaryIO:
    return open(anonymous_descriptor(), "r+b")  # noqa: PTH123  (it has no path)


def _environment(resources: JobResources) -> dict[str, str]:
    gpus = {"CUDA_VISIBLE_DEVICES": ",".join(resources.gpus)} if resources.gpus else {}
    reports = {REPORTS: resources.reports} if resources.reports else {}
    return ENVIRONMENT | gpus | reports


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


def _command(config: DictConfig, directory: Path) -> list[str]:
    mine = ("hydra.mode", "hydra.run.", "hydra.sweep.", "hydra.launcher", "hydra/launcher")
    kept = [x for x in config.hydra.overrides.hydra if not x.lstrip("+").startswith(mine)]
    kept = [x for x in kept if not x.startswith(("hydra.sweeper", "hydra/sweeper"))]
    where = json.dumps(str(directory), ensure_ascii=False)
    number = int(config.hydra.job.num)
    return [
        *(sys.executable, "-m", "hybridtrain", *FLAGS, *overrides_of(config.hydra), *kept),
        *("hydra.mode=RUN", f"hydra.run.dir={where}", f"hydra.job.num={number}"),
    ]


def command_of(overrides: Sequence[str]) -> str:
    """The command that runs a job with these overrides alone, to be typed in a shell."""
    return shlex.join(["python", "-m", "hybridtrain", *FLAGS, *as_given(overrides)])


def report(outcome: CommandOutcome) -> None:
    """In a fresh job process: send the outcome to the sweep."""
    if fd := ENVIRONMENT.get(RESULT):
        _leave(outcome, int(fd))


def _leave(outcome: CommandOutcome, fd: int) -> None:
    os.write(fd, json.dumps(asdict(outcome)).encode())


def is_job() -> bool:
    """Whether this process is a job in a fresh interpreter, whose options a sweep has chosen."""
    return RESULT in ENVIRONMENT


def adopt() -> None:
    """In a fresh job process: end with the sweep, and hide its variables from children."""
    os.environ.pop(RESULT, None)
    if parent := os.environ.pop(PARENT, None):
        from hybridtrain.engine.worlds.parent_death import die_with_parent

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
