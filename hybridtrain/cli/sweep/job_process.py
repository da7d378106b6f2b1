"""The process of one job of a sweep: start it with a clean environment, forward signals, wait.

The job has a process group of its own, so that Ctrl-C reaches the sweep alone; the sweep sends it
on once and waits while the job saves a checkpoint and stops its workers.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.core.utils import run_job
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from hybridtrain.cli.claim import claim_new, release_all
from hybridtrain.cli.exit_status import FAILED, CommandOutcome, guarded, interrupted
from hybridtrain.cli.hydra_config import overrides_of
from hybridtrain.cli.quiet import hush
from hybridtrain.util.anonymous_files import anonymous_descriptor
from hybridtrain.worlds.local.signals import ending_signals

RESULT, PARENT = "HYBRIDTRAIN_RESULT", "HYBRIDTRAIN_PARENT"
ENVIRONMENT: dict[str, str] = {}  # at the start of the command, before any job
FLAGS: list[str] = []  # of the command line, such as --config-dir
PATIENCE_S = 30.0  # for a job to save its checkpoint after Ctrl-C


def remember_environment() -> None:
    """Keep the environment that every job starts with."""
    ENVIRONMENT.clear()
    ENVIRONMENT.update(os.environ)


def run_forked(context: HydraContext, task: TaskFunction, config: DictConfig) -> CommandOutcome:
    """Run the job in a forked child, which shares this process' imports."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    child = fork.Process(
        target=_forked_main, args=(theirs, ours, os.getpid(), context, task, config)
    )
    sys.stdout.flush()
    sys.stderr.flush()
    child.start()
    theirs.close()
    assert child.pid is not None
    _in_group(child.pid)
    with _passing_on(child.pid) as signals:
        _wait(child.join, lambda: child.exitcode is not None, child.pid, signals)
        outcome = _receive(ours)
    return _verdict(outcome, child.exitcode, signals)


def _forked_main(
    pipe: Connection,
    other: Connection,
    parent: int,
    context: HydraContext,
    task: TaskFunction,
    config: DictConfig,
) -> None:
    from hybridtrain.worlds.local.parent_death import die_with_parent

    other.close()
    _in_group(0)
    die_with_parent(parent)
    for signum in ending_signals():
        default = signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL
        signal.signal(signum, default)
    os.environ.clear()
    os.environ.update(ENVIRONMENT)
    hush()
    overrides = overrides_of(config.hydra)
    sys.argv = [sys.argv[0], *overrides]
    outcome = guarded(lambda: _hydra_job(context, task, config), overrides)
    release_all()
    sys.stdout.flush()
    with contextlib.suppress(OSError):
        pipe.send(outcome)
    pipe.close()
    sys.exit(outcome.exit)


def _hydra_job(context: HydraContext, task: TaskFunction, config: DictConfig) -> CommandOutcome:
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


def _receive(pipe: Connection) -> CommandOutcome | None:
    try:
        return pipe.recv() if pipe.poll(0) else None
    except (EOFError, OSError):
        return None
    finally:
        pipe.close()


def run_fresh(config: DictConfig) -> CommandOutcome:
    """Run the job in a fresh interpreter: the same command with this job's overrides."""
    directory = Path(str(config.hydra.sweep.dir)) / str(config.hydra.sweep.subdir)
    with open(anonymous_descriptor(), "r+b") as result:  # noqa: PTH123  (it has no path)
        fd = result.fileno()
        environment = ENVIRONMENT | {RESULT: str(fd), PARENT: str(os.getpid())}
        child = subprocess.Popen(
            _command(config, directory), env=environment, process_group=0, pass_fds=(fd,)
        )
        with _passing_on(child.pid) as signals:
            _wait(child.wait, lambda: child.poll() is not None, child.pid, signals)
        result.seek(0)
        said = result.read()
    outcome = CommandOutcome(**json.loads(said)) if said else None
    return _verdict(outcome, child.returncode, signals)


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


def report(outcome: CommandOutcome) -> None:
    """In a fresh job process: send the outcome to the sweep."""
    if fd := ENVIRONMENT.get(RESULT):
        os.write(int(fd), json.dumps(asdict(outcome)).encode())


def adopt() -> None:
    """In a fresh job process: end with the sweep, and hide its variables from children."""
    os.environ.pop(RESULT, None)
    if parent := os.environ.pop(PARENT, None):
        from hybridtrain.worlds.local.parent_death import die_with_parent

        die_with_parent(int(parent))


def _in_group(pid: int) -> None:
    """Give the process its own group; parent and child both call it, whichever is first."""
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)


@contextlib.contextmanager
def _passing_on(pid: int) -> Iterator[list[int]]:
    """While the job runs, forward to it the signals that would end the sweep.

    Ctrl-C goes to the job's whole group, as a terminal would send it; others to its first process.
    The third signal kills the job. Yields the list of signals forwarded.
    """
    seen: list[int] = []

    def pass_on(signum: int, _: FrameType | None) -> None:
        seen.append(signum)
        with contextlib.suppress(OSError):
            if len(seen) > 2:
                os.killpg(pid, signal.SIGKILL)
            elif signum == signal.SIGINT:
                os.killpg(pid, signum)
            else:
                os.kill(pid, signum)

    before = {x: signal.signal(x, pass_on) for x in ending_signals()}
    try:
        yield seen
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _wait(
    wait: Callable[..., Any], ended: Callable[[], bool], pid: int, signals: list[int]
) -> None:
    """Wait for the job; after an interruption at most ``PATIENCE_S``, then kill it."""
    patience = PATIENCE_S
    while not ended():
        with contextlib.suppress(subprocess.TimeoutExpired):
            wait(timeout=0.5)
        patience -= 0.5 if signals else 0.0
        if patience <= 0:
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)


def _verdict(
    outcome: CommandOutcome | None, code: int | None, signals: list[int]
) -> CommandOutcome:
    if signals:
        directory = outcome.directory if outcome is not None else None
        return replace(interrupted(signals[0]), directory=directory)
    if outcome is not None:
        return outcome
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return CommandOutcome(exit=FAILED, error=f"its process was killed by {name}")
    return CommandOutcome(
        exit=code or FAILED, error=f"its process ended with status {code} and no word"
    )
