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
import sys
import types
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, configure_log, filter_overrides, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from hybridtrain.cli.exit_status import CommandOutcome
from hybridtrain.cli.further_host import number_of_hosts
from hybridtrain.cli.hydra_config import overrides_of
from hybridtrain.cli.sweep import job_process
from hybridtrain.cli.validation.config_checks import check_config
from hybridtrain.cli.validation.host_checks import check_directory, check_machine
from hybridtrain.errors import UserError
from hybridtrain.lightning_package import decide_by_configuration
from hybridtrain.monitoring.watchdog import to_stderr
from hybridtrain.report.comparison import PAGE, compare
from hybridtrain.report.page import write
from hybridtrain.report.runs import JOBS_FILE, as_json
from hybridtrain.util.files import short
from hybridtrain.util.option_types import typed


@dataclass(frozen=True, slots=True)
class JobRow:
    """A row of the table at the end of a sweep; ``folder``: the job's directory."""

    number: int
    overrides: list[str]
    outcome: CommandOutcome
    folder: Path


ROWS: list[JobRow] = []  # the jobs of this process' sweep; the command line prints them
DIRECTORY: list[Path] = []  # of that sweep


class ProcessLauncher(Launcher):
    """Runs the jobs one after another, each in a process of its own.

    Args:
        start_method: ``auto``: ``fork`` without a GPU, else ``popen``, a fresh interpreter.
    """

    @typed("hydra.launcher.")
    def __init__(self, start_method: Literal["auto", "fork", "popen"] = "auto") -> None:
        self.start_method = start_method

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
        """Check every job, then run them in order. Raises UserError before the first starts."""
        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        jobs = [
            self._job(list(overrides), initial_job_idx + i)
            for i, overrides in enumerate(job_overrides)
        ]
        for job in jobs:
            cfg = _without_hydra(job)
            check_config(cfg, overrides_of(job.hydra))
            _check_hosts(cfg)
            check_machine(cfg)
        check_directory(Path(str(self.config.hydra.sweep.dir)))
        return [self._run(job, len(jobs) + initial_job_idx) for job in jobs]

    def _job(self, overrides: list[str], number: int) -> DictConfig:
        config = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(config):
            config.hydra.job.id = f"job_{number}"
            config.hydra.job.num = number
        return config

    def _run(self, job: DictConfig, total: int) -> JobReturn:
        number = int(job.hydra.job.num)
        overrides = list(filter_overrides(overrides_of(job.hydra)))
        print(f"--- job {number + 1} of {total}: {' '.join(overrides)}", flush=True)
        if self._forks():
            decide_by_configuration(job)
            import hybridtrain.cli.run  # noqa: F401  (torch and Lightning, once for all jobs)

            outcome = job_process.run_forked(self.hydra_context, self.task_function, job)
        else:
            outcome = job_process.run_fresh(job)
        directory = Path(str(job.hydra.sweep.dir))
        ROWS.append(JobRow(number, overrides, outcome, directory / str(job.hydra.sweep.subdir)))
        DIRECTORY[:] = [directory]
        if outcome.exit >= 128:
            raise SystemExit(outcome.exit)
        return _job_return(job, outcome)

    def _forks(self) -> bool:
        if self.start_method != "auto":
            return self.start_method == "fork"
        return hasattr(os, "fork") and not _gpu_present()


def _check_hosts(cfg: DictConfig) -> None:
    if (given := number_of_hosts(cfg)) > 1:
        raise UserError(
            f"trainer.num_nodes={given} was given with --multirun, whose jobs use one host; start "
            "each run over several hosts by itself, or leave trainer.num_nodes out"
        )


def _gpu_present() -> bool:
    return any(Path(x).exists() for x in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))


def _without_hydra(config: DictConfig) -> DictConfig:
    return OmegaConf.masked_copy(config, [str(x) for x in config if x != "hydra"])


def _job_return(job: DictConfig, outcome: CommandOutcome) -> JobReturn:
    """The job's result for the sweeper; the metric of a failed job is nan, so sweeps continue."""
    result = JobReturn()
    result.overrides = overrides_of(job.hydra)
    result.cfg = _without_hydra(job)
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
        done = row.outcome
        if done.exit >= 128:
            text = done.error or "interrupted"
        elif done.exit != 0:
            text = f"failed ({done.exit}): {(done.error or 'no reason given')[:80]}"
        else:
            text = "-" if done.metric is None else f"{done.metric:.6g}"
        own = " ".join(x for x in row.overrides if x not in common)
        cells.append([str(row.number), own, text, done.directory or "-"])
    widths = [max(len(line[i]) for line in cells) for i in range(3)]
    return "\n".join(
        "  ".join([*(x.ljust(w) for x, w in zip(line, widths, strict=False)), line[3]]).rstrip()
        for line in cells
    )


def register() -> None:
    """Register ``hydra/launcher=process`` as a plugin in the module ``hydra_plugins.hybridtrain``.

    Hydra takes plugins from the package ``hydra_plugins`` alone. A folder of that name in our wheel
    would be loaded by every Hydra program on the machine; a module made here concerns only ours.
    """
    plugins = Plugins.instance()  # scans hydra_plugins, before we add to it
    home = types.ModuleType("hydra_plugins.hybridtrain")
    setattr(home, ProcessLauncher.__name__, ProcessLauncher)
    ProcessLauncher.__module__ = home.__name__
    parent = sys.modules.setdefault("hydra_plugins", types.ModuleType("hydra_plugins"))
    parent.hybridtrain = home  # type: ignore[attr-defined]
    sys.modules[home.__name__] = home
    plugins.register(ProcessLauncher)


def leave_page(rows: Sequence[JobRow], directory: Path) -> str | None:
    """Write the page that compares the jobs into the sweep's ``directory``; returns its path.

    An error here is one line on standard error: it does not change how the sweep ends.
    """
    try:
        write(directory / JOBS_FILE, _endings(rows, directory), "hydra.sweep.dir")
        compare([directory], directory)
    except (Exception, KeyboardInterrupt) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        again = f"python -m hybridtrain.compare {short(directory)}"
        to_stderr(f"no page that compares the jobs ({reason}); {again}")
        return None
    return short(directory / PAGE)


def _endings(rows: Sequence[JobRow], directory: Path) -> str:
    """Exit status, error and metric of each job by folder, for jobs that left no summary."""
    endings = {row.folder.relative_to(directory).as_posix(): asdict(row.outcome) for row in rows}
    return as_json(endings)
