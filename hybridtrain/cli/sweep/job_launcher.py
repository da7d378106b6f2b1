"""A Hydra launcher that runs every job of a sweep in a process and a directory of its own.

Lightning's DDP, started inside a Hydra sweep, re-runs the whole command line in its children,
leaves its process group and its environment variables to the next job, and then trains silently
on fewer processes than asked for. Here a job is a child process: forked where no GPU is present
(0.1 s), a fresh interpreter where one is (a forked process cannot use CUDA once its parent has
initialised it). The children never sweep, and no worker re-enters Hydra.

After a failed job the sweep continues; the command's exit status is 1 at the end.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, configure_log, filter_overrides, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from hybridtrain.cli.config_values import overrides_of, quoted
from hybridtrain.cli.exit_status import CommandOutcome
from hybridtrain.cli.further_host import number_of_hosts
from hybridtrain.cli.hydra_config import as_given, with_own_parts
from hybridtrain.cli.sweep import job_process, resumed
from hybridtrain.cli.sweep.job_process import JobProcess, JobResources
from hybridtrain.cli.sweep.side_by_side import SweepJob, run_jobs
from hybridtrain.cli.validation.config_checks import check_config
from hybridtrain.cli.validation.host_checks import check_directory, check_machine
from hybridtrain.engine.monitoring.watchdog import to_stderr
from hybridtrain.errors import UserError
from hybridtrain.lightning_package import decide_by_configuration
from hybridtrain.report.charts import number
from hybridtrain.report.comparison import PAGE, compare
from hybridtrain.report.page import write
from hybridtrain.report.runs import JOBS_FILE, as_json, brief
from hybridtrain.util.files import short
from hybridtrain.util.option_types import Positive, typed


@dataclass(frozen=True, slots=True)
class JobRow:
    """A row of the table at the end of a sweep; ``folder``: the job's directory."""

    number: int
    overrides: list[str]
    outcome: CommandOutcome
    folder: Path


ROWS: list[JobRow] = []  # the jobs of this process' sweep; the command line prints them
DIRECTORY: list[Path] = []  # of that sweep
LAST_WORDS: list[str] = []  # printed below the table


class ProcessLauncher(Launcher):
    """Runs the jobs, each in a process of its own.

    Args:
        start_method: ``auto``: ``fork`` without a GPU, else ``popen``, a fresh interpreter.
        at_once: the number of jobs side by side; ``auto``: as many as there are cores for their
            workers, memory (as much as the largest job so far) and GPUs.
    """

    @typed("hydra.launcher.")
    def __init__(
        self,
        start_method: Literal["auto", "fork", "popen"] = "auto",
        at_once: Positive | Literal["auto"] = 1,
    ) -> None:
        self.start_method = start_method
        self.at_once = at_once

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Called by Hydra before the first launch."""
        self.hydra_context = hydra_context
        self.task_function = task_function
        self.config = config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Check every job, then run them. Raises UserError before the first starts."""
        self.begin()
        total = len(job_overrides) + initial_job_idx
        jobs = [
            self.job(list(overrides), initial_job_idx + i, total)
            for i, overrides in enumerate(job_overrides)
        ]
        outcomes = self.run_all(jobs)
        return [_job_return(job.config, outcomes[job.number]) for job in jobs]

    def run_all(
        self,
        jobs: Sequence[SweepJob],
        seen: Callable[[CommandOutcome], None] = lambda outcome: None,
    ) -> dict[int, CommandOutcome]:
        """Check the jobs, run those that have not finished before; outcomes by the jobs' numbers.

        Args:
            seen: called with each outcome as soon as it is there; may raise UserError.
        """
        for job in jobs:
            check_job(job)
        directory = Path(str(self.config.hydra.sweep.dir))
        check_directory(directory)
        resumed.sign(directory, self.config)
        outcomes: dict[int, CommandOutcome] = {}

        def ended(job: SweepJob, outcome: CommandOutcome) -> CommandOutcome:
            seen(outcome)
            return outcomes.setdefault(job.number, outcome)

        self.run(self.left_of(jobs, outcomes), ended)
        return outcomes

    def begin(self) -> None:
        """Prepare Hydra for jobs."""
        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)

    def job(
        self, overrides: Sequence[str], number: int, total: int | None, more: Sequence[str] = ()
    ) -> SweepJob:
        """Compose the job with these overrides; ``more`` are not shown in tables."""
        if self.config.get("resume") is not None:  # the sweep's, not the job's
            overrides = [x for x in overrides if not x.startswith("resume=")]
        config = self._composed(overrides, number)
        if more:  # a directory that is named by the overrides is that of the job without these
            place = quoted("hydra.sweep.subdir", config.hydra.sweep.subdir)
            config = self._composed([*overrides, *more, place], number)
        return SweepJob(config, tuple(as_given(filter_overrides(overrides))), total)

    def _composed(self, overrides: Sequence[str], number: int) -> DictConfig:
        loader = self.hydra_context.config_loader
        config: DictConfig = loader.load_sweep_config(self.config, with_own_parts(overrides))
        with open_dict(config):
            config.hydra.job.id = f"job_{number}"
            config.hydra.job.num = number
        return config

    def left_of(
        self, jobs: Sequence[SweepJob], outcomes: dict[int, CommandOutcome]
    ) -> Iterator[SweepJob]:
        """The jobs that have not finished before; adds to ``outcomes`` those that have."""
        if self.config.get("resume") is None:
            return iter(jobs)
        left = []
        for job in jobs:
            before = resumed.kept(job.folder, without_hydra(job.config))
            if before is None:
                left.append(job)
            else:
                outcomes[job.number] = before
                self.note(job, before)
        print(f"{len(jobs) - len(left)} of {len(jobs)} jobs have finished before", flush=True)
        return (
            self.job(job.overrides, job.number, job.total, resumed.going_on(job.folder))
            for job in left
        )

    def run(
        self,
        jobs: Iterator[SweepJob],
        ended: Callable[[SweepJob, CommandOutcome], CommandOutcome],
        listen: Callable[[float], None] = time.sleep,
        tells: bool = True,
    ) -> None:
        """Run the jobs; raises SystemExit after a signal.

        ``ended`` says what the table is to show; ``tells``: print a line when a job begins or ends.
        """
        began: dict[int, float] = {}

        def start(job: SweepJob, resources: JobResources) -> JobProcess:
            began[job.number] = time.monotonic()
            where = f" (output: {resources.output})" if resources.output else ""
            if tells:
                print(f"{job}: {' '.join(job.overrides)}{where}", flush=True)
            return self._start(job, resources)

        def end(job: SweepJob, outcome: CommandOutcome) -> None:
            outcome = ended(job, outcome)
            self.note(job, outcome)
            if tells and self.at_once != 1:
                took_s = time.monotonic() - began[job.number]
                print(f"{job}: {_verdict(outcome)}, after {took_s:.1f} s", flush=True)

        if signum := run_jobs(jobs, start, end, self.at_once, listen):
            raise SystemExit(128 + signum)

    def note(self, job: SweepJob, outcome: CommandOutcome) -> None:
        """Add a row to the table."""
        ROWS.append(JobRow(job.number, list(job.overrides), outcome, job.folder))
        ROWS.sort(key=lambda row: row.number)
        DIRECTORY[:] = [Path(str(job.config.hydra.sweep.dir))]

    def _start(self, job: SweepJob, using: JobResources) -> JobProcess:
        if not self._forks():
            return job_process.start_fresh(job.config, using)
        decide_by_configuration(job.config)
        import hybridtrain.cli.run  # noqa: F401  (torch and Lightning, once for all jobs)

        return job_process.start_forked(self.hydra_context, self.task_function, job.config, using)

    def _forks(self) -> bool:
        if self.start_method != "auto":
            return self.start_method == "fork"
        has_gpu = any(Path(x).exists() for x in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))
        return hasattr(os, "fork") and not has_gpu


def check_job(job: SweepJob) -> None:
    """Raise UserError if the job cannot run here as configured."""
    cfg = without_hydra(job.config)
    check_config(cfg, overrides_of(job.config.hydra))
    if (given := number_of_hosts(cfg)) > 1:
        raise UserError(
            f"trainer.num_nodes={given} was given with --multirun, whose jobs use one host; start "
            "each run over several hosts by itself, or leave trainer.num_nodes out"
        )
    check_machine(cfg)


def without_hydra(config: DictConfig) -> DictConfig:
    """The job's own configuration."""
    return OmegaConf.masked_copy(config, [str(x) for x in config if x != "hydra"])


def _job_return(job: DictConfig, outcome: CommandOutcome) -> JobReturn:
    """The job's result for the sweeper; the metric of a failed job is nan, so sweeps continue."""
    result = JobReturn()
    result.overrides = overrides_of(job.hydra)
    result.cfg = without_hydra(job)
    result.working_dir = str(Path.cwd())
    result.task_name = str(job.hydra.job.name)
    result.status = JobStatus.COMPLETED
    result.return_value = outcome.metric if outcome.exit == 0 else math.nan
    return result


def table(rows: Sequence[JobRow]) -> str:
    """The jobs of a sweep as aligned text: overrides that differ, metric or error, directory."""
    common = set(rows[0].overrides).intersection(*(x.overrides for x in rows))
    common = common if len(rows) > 1 else set()
    cells = [["job", "overrides", "metric", "where"]]
    for row in rows:
        own = " ".join(brief(x) for x in row.overrides if x not in common)
        cells.append([str(row.number), own, _verdict(row.outcome), row.outcome.directory or "-"])
    widths = [max(len(line[i]) for line in cells) for i in range(3)]
    return "\n".join(
        "  ".join([*(x.ljust(w) for x, w in zip(line, widths, strict=False)), line[3]]).rstrip()
        for line in cells
    )


def _verdict(done: CommandOutcome) -> str:
    """The metric, or why there is none."""
    if done.exit >= 128:
        return done.error or "interrupted"
    if done.exit != 0:
        return f"failed ({done.exit}): {(done.error or 'no reason given')[:80]}"
    metric = [] if done.metric is None else [number(done.metric)]
    return " ".join([*metric, *([done.error] if done.error else [])]) or "-"


def register(*kinds: type) -> None:
    """Register launchers and sweepers as plugins in the module ``hydra_plugins.hybridtrain``.

    Hydra takes plugins from the package ``hydra_plugins`` alone. A folder of that name in our wheel
    would be loaded by every Hydra program on the machine; a module made here concerns only ours.
    """
    plugins = Plugins.instance()  # scans hydra_plugins, before we add to it
    home = types.ModuleType("hydra_plugins.hybridtrain")
    parent = sys.modules.setdefault("hydra_plugins", types.ModuleType("hydra_plugins"))
    parent.hybridtrain = home  # type: ignore[attr-defined]
    sys.modules[home.__name__] = home
    for kind in kinds:
        setattr(home, kind.__name__, kind)
        kind.__module__ = home.__name__
        plugins.register(kind)


def leave_page(rows: Sequence[JobRow], directory: Path) -> str | None:
    """Write the page that compares the jobs into the sweep's ``directory``; returns its path.

    An error here is one line on standard error: it does not change how the sweep ends.
    """
    try:
        write(directory / JOBS_FILE, _endings(rows, directory), "hydra.sweep.dir")
        compare([directory], directory)
    except (Exception, KeyboardInterrupt) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        again = f"python -m hybridtrain compare {shlex.quote(short(directory))}"
        to_stderr(f"no page that compares the jobs ({reason}); {again}")
        return None
    return short(directory / PAGE)


def _endings(rows: Sequence[JobRow], directory: Path) -> str:
    """Exit status, error and metric of each job by folder, for jobs that left no summary."""
    endings = {row.folder.relative_to(directory).as_posix(): asdict(row.outcome) for row in rows}
    return as_json(endings)
