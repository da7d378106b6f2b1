"""``hydra/sweeper=optuna``: a search by Optuna's ask and tell, over any keys, on our launcher."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from hybridtrain.cli import explain
from hybridtrain.cli.config_values import assignments
from hybridtrain.cli.exit_status import CommandOutcome
from hybridtrain.cli.sweep import job_launcher, job_process, resumed
from hybridtrain.cli.sweep.job_launcher import ProcessLauncher, check_job
from hybridtrain.cli.sweep.side_by_side import SweepJob
from hybridtrain.cli.sweep.study import (
    STUDY_FILE,
    Sampling,
    Search,
    check_trials,
    combinations,
    reading,
    seed_of,
    space_of,
)
from hybridtrain.cli.validation.host_checks import check_directory
from hybridtrain.cli.validation.target_checks import check_scheme
from hybridtrain.errors import Lost, UserError
from hybridtrain.report import charts
from hybridtrain.report.runs import as_json, brief
from hybridtrain.report.search import SEARCH_FILE
from hybridtrain.util.files import short, write_whole
from hybridtrain.util.option_types import Natural, Positive, typed
from hybridtrain.util.own_directory import OwnDirectory

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial, Trial

    from hybridtrain.cli.sweep.reports import Mailbox

STUDY = "search"


class JobSweeper(Sweeper):
    """A sweeper on our launcher."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Called by Hydra before the sweep. Raises UserError if another launcher is chosen."""
        self.sweep_config = config
        launcher: Any = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )
        if getattr(launcher, "run", None) is None:
            raise UserError("a search needs hydra/launcher=process, the default")
        self.launcher: ProcessLauncher = launcher
        self.directory = Path(str(config.hydra.sweep.dir))


class OptunaSweeper(JobSweeper):
    """Searches for the best values of keys with Optuna.

    Args:
        sampler: how values are drawn; ``grid`` takes every combination once.
        pruner: which jobs end early, by what they log in training (``task.monitor``, else
            ``task.metric``); null: none.
        direction: of ``task.metric``; null: that of ``task.mode``.
        n_trials: jobs in all; null: 20, or the whole grid.
        seed: of the sampler; null: another each time.
        storage: null: ``study.db`` in the sweep's directory; a URL of a database (``sqlite:///F``),
            or a file whose name ends in ``.journal``.
        study_name: in a storage of several studies; null: the sweep's directory.
        params: the search space in a file, key -> ``interval(0.001, 0.1)`` and so on.
    """

    @typed("hydra.sweeper.")
    def __init__(
        self,
        sampler: Sampling = "tpe",
        pruner: Literal["median", "hyperband"] | None = None,
        direction: Literal["minimize", "maximize"] | None = None,
        n_trials: Positive | None = None,
        seed: Natural | None = 0,
        storage: str | None = None,
        study_name: str | None = None,
        params: dict[str, Any] | None = None,
    ) -> None:
        self.sampler, self.pruner, self.direction = sampler, pruner, direction
        self.n_trials, self.seed = n_trials, seed
        self.storage, self.study_name = storage, study_name
        self.params = dict(params or {})

    def sweep(self, arguments: list[str]) -> None:
        """Run the search. Raises UserError before a job starts if something is wrong."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.launcher.begin()
        directory = self.directory
        given = [*assignments(self.params), *arguments]
        space, fixed = space_of(given)
        explain.check_groups(given)
        first = self._checked(space, fixed, given)
        if self.sampler == "grid":
            combinations(space)
        check_directory(directory)
        task = first.config.task
        direction = self.direction or ("maximize" if task.mode == "max" else "minimize")
        try:
            study = self._study(directory, direction)
            with reading(study):
                check_trials(study, directory)
                search = Search(study, space, self.sampler, seed_of(study, self.seed), directory)
                search.prepare(self.n_trials, alone=self.storage is None)
            resumed.sign(directory, self.sweep_config)
            SearchRun(
                self.launcher, search, fixed, str(task.metric), _turned(task, direction)
            ).run()
        except (optuna.exceptions.StorageInternalError, OSError) as error:
            raise Lost(
                f"the study of the search cannot be kept: {explain.one_line(error)[:200]}; "
                f"afterwards go on with resume={short(directory)}"
            ) from error

    def _checked(
        self, space: dict[str, BaseDistribution], fixed: list[str], given: list[str]
    ) -> SweepJob:
        """The job with the first value of each key, which is not run."""
        searched: Any = space.items()
        first = {key: x.choices[0] if hasattr(x, "choices") else x.low for key, x in searched}
        job = checked_job(self.launcher, [*fixed, *assignments(first)], given)
        if job.config.task.metric is None:
            raise UserError(
                "task.metric=null: a search needs a metric that the module logs; name it with "
                "task.metric=…, and its direction with hydra.sweeper.direction"
            )
        task = job.config.task
        if str(task.metric).startswith("test/") and not job.config.test:
            raise UserError(
                f"test=false was given, and task.metric={task.metric} is a metric of the test; "
                f"give task.metric={task.monitor}, or leave test=false out"
            )
        return job

    def _study(self, directory: Path, direction: Any) -> optuna.Study:
        import optuna

        if self.storage is None and os.path.lexists(directory / STUDY_FILE):
            with OwnDirectory(directory, f"resume={short(directory)}") as own_directory:
                own_directory.check(STUDY_FILE)
        of: Any = optuna.pruners
        pruners = {"median": of.MedianPruner, "hyperband": of.HyperbandPruner, None: of.NopPruner}
        own = STUDY if self.storage is None else str(directory.absolute())
        try:
            study = optuna.create_study(
                storage=self._opened(directory),
                study_name=self.study_name or own,
                direction=direction,
                pruner=pruners[self.pruner](),
                load_if_exists=True,
            )
        except Exception as error:  # SQLAlchemy's, Optuna's
            raise UserError(
                f"hydra.sweeper.storage={self.storage or STUDY_FILE}: the study cannot be opened: "
                f"{explain.one_line(error)[:200]}"
            ) from error
        if study.direction.name.lower() != direction:
            raise UserError(
                f"hydra.sweeper.direction={direction}: the study {study.study_name} was begun to "
                f"{study.direction.name.lower()}; choose another hydra.sweeper.study_name"
            )
        return study

    def _opened(self, directory: Path) -> Any:
        """The storage, as Optuna takes it."""
        given = self.storage or f"sqlite:///{(directory / STUDY_FILE).absolute()}"
        if not given.endswith(".journal"):
            return given
        from optuna.storages.journal import JournalFileBackend, JournalStorage

        return JournalStorage(JournalFileBackend(given))


def checked_job(launcher: ProcessLauncher, overrides: list[str], given: Sequence[str]) -> SweepJob:
    """A job that is not run. Raises UserError, explained by the overrides that were ``given``."""
    try:
        job = launcher.job(overrides, 0, None)
        check_job(job)
        check_scheme(job.config)
    except UserError:
        raise
    except Exception as error:  # Hydra's
        raise UserError(explain.explain(error, given) or explain.one_line(error)) from error
    return job


def _turned(task: Any, direction: str) -> bool:
    """Whether ``task.monitor``, which pruners judge by, has another direction than the study."""
    monitors = task.monitor is not None and task.monitor != task.metric
    return monitors and (task.mode == "max") != (direction == "maximize")


class LiveTable:
    """The trials on a terminal, drawn anew at each change; ``sign``: -1 turns reports around."""

    ROWS = 12  # the last trials

    def __init__(self, sign: float = 1.0) -> None:
        self._sign, self._n_lines = sign, 0

    def draw(self, trials: Sequence[FrozenTrial], metric: str, best: FrozenTrial | None) -> None:
        """Replace the table by that of now."""
        head = metric.ljust(8)
        lines = [f"job   state     {head}  reported  reports  values"]
        for trial in [x for x in trials if x.state.name != "WAITING"][-self.ROWS :]:
            last, told = trial.last_step, trial.intermediate_values
            value = _metric_of(trial)
            end = "-" if value is None else charts.number(value)
            now = "-" if last is None else charts.number(self._sign * told[last])
            n_reports = 0 if last is None else last + 1
            values = " ".join(map(brief, assignments(trial.params)))
            row = f"{trial.number:<4}  {trial.state.name.lower():8}  {end:{len(head)}}"
            lines.append(f"{row}  {now:8}  {n_reports:<7}  {values}")
        if best is not None:
            lines.append(f"best: job {best.number}, {charts.number(best.value or 0.0)}")
        width = shutil.get_terminal_size().columns
        back = f"\x1b[{self._n_lines}F\x1b[J" if self._n_lines else ""
        print(back + "\n".join(x[: width - 1] for x in lines), flush=True)
        self._n_lines = len(lines)


class SearchRun:
    """Runs the trials of a search as jobs, until there are none left.

    Args:
        metric: its name, for messages.
        turned: what jobs report in training is better where the metric would be worse.
    """

    def __init__(
        self,
        launcher: ProcessLauncher,
        search: Search,
        fixed: list[str],
        metric: str,
        turned: bool = False,
    ) -> None:
        self._sign = -1.0 if turned else 1.0
        self._launcher, self._search, self._fixed, self._metric = launcher, search, fixed, metric
        self._study, self._states = search.study, search.states
        self._trials: dict[int, Trial] = {}
        self._mailboxes: dict[int, Mailbox] = {}
        self._pruned: dict[int, int] = {}  # job -> number of the report
        live = launcher.at_once != 1 and sys.stdout.isatty()
        self._shown = LiveTable(self._sign) if live else None
        self._measured = any(x.state == self._states.COMPLETE for x in search.before)

    def run(self) -> None:
        """Run all jobs; raises SystemExit after a signal."""
        for trial in self._search.before:
            job = self._job(trial)
            self._launcher.note(job, self._ending(trial, job.folder))
        try:
            tells = self._shown is None
            self._launcher.run(self._jobs(), self._ended, self._listen, tells)
        finally:
            self._leave()
        if self._search.best() is None:
            raise Lost("no job of the search has returned a metric")

    def _job(self, trial: FrozenTrial | Trial, more: Sequence[str] = ()) -> SweepJob:
        overrides = [*self._fixed, *assignments(trial.params)]
        return self._launcher.job(overrides, trial.number, self._search.n_trials, more)

    def _ending(self, trial: FrozenTrial, folder: Path) -> CommandOutcome:
        """The outcome of a trial that was finished before the search went on."""
        done = trial.state == self._states.COMPLETE
        why = "" if done else f"{trial.state.name.lower()} before the search went on"
        # Another trial replaces one that had failed, which would else count for ever.
        return CommandOutcome(0, _metric_of(trial), why or None, short(folder))

    def _jobs(self) -> Iterator[SweepJob]:
        from hybridtrain.cli.sweep.reports import Mailbox  # it imports Lightning

        while (found := self._search.next()) is not None:
            trial, has_begun = found
            job = self._job(trial)
            try:
                check_job(job)
            except UserError as error:
                outcome = CommandOutcome(2, error=str(error))
                self._tell(trial, outcome)
                self._launcher.note(job, outcome)
                continue
            self._trials[trial.number] = trial
            more = resumed.going_on(job.folder) if has_begun else []
            self._show()
            made = self._job(trial, more) if more else job
            self._mailboxes[trial.number] = Mailbox()
            yield replace(made, reports=self._mailboxes[trial.number].path)

    def _listen(self, seconds: float) -> None:
        """Answer the jobs' reports, then wait."""
        for number, mailbox in self._mailboxes.items():
            if (report := mailbox.take()) is not None:
                mailbox.answer(self._judge(number, *report))
        time.sleep(seconds)

    def _judge(self, number: int, step: int, value: float) -> bool:
        """Take a report of a job, and say whether it is to end."""
        trial = self._trials[number]
        known = self._study.get_trials(deepcopy=False)[number].intermediate_values
        if step not in known and math.isfinite(value):
            trial.report(self._sign * value, step)
        if trial.should_prune():
            self._pruned[number] = step
        self._show()
        return number in self._pruned

    def _show(self) -> None:
        if self._shown is not None:
            trials = self._study.get_trials(deepcopy=False)
            known = [x for x in trials if self._search.misfit(x) is None]
            self._shown.draw(known, self._metric, self._search.best())

    def _ended(self, job: SweepJob, outcome: CommandOutcome) -> CommandOutcome:
        if (mailbox := self._mailboxes.pop(job.number, None)) is not None:
            mailbox.close()
        if outcome.exit >= 128:  # it stays RUNNING, and goes on with the search
            return outcome
        if job.number in self._pruned and outcome.exit == 0:
            outcome = replace(outcome, error=f"pruned at report {self._pruned[job.number] + 1}")
        elif outcome.exit == 0 and outcome.metric is not None and not math.isfinite(outcome.metric):
            outcome = replace(outcome, exit=1, error=f"{self._metric} is {outcome.metric}")
        self._tell(self._trials.pop(job.number), outcome)
        self._show()
        missing = outcome.exit == 0 and outcome.metric is None and job.number not in self._pruned
        if not self._measured and (missing or f"task.metric={self._metric}" in str(outcome.error)):
            raise UserError(
                outcome.error or f"task.metric={self._metric}: the first job did not return it"
            )
        return outcome

    def _tell(self, trial: Trial, outcome: CommandOutcome) -> None:
        if outcome.exit == 0 and trial.number in self._pruned:
            self._study.tell(trial, state=self._states.PRUNED)
        elif outcome.exit == 0 and outcome.metric is not None:
            self._study.tell(trial, outcome.metric)
            self._measured = True
        else:
            trial.set_user_attr("error", str(outcome.error)[:200])
            self._study.tell(trial, state=self._states.FAIL)

    # ---- what the search leaves ----------------------------------------------------------------

    def _leave(self) -> None:
        """Write what the page shows of the search, and print the winner's command."""
        best, trials = self._search.best(), self._study.get_trials(deepcopy=False)
        trials = [x for x in trials if self._search.misfit(x) is None]
        command = ""
        if best is not None:
            fixed = [x for x in self._fixed if not x.startswith("resume=")]
            command = job_process.command_of([*fixed, *assignments(best.params)])
            value = charts.number(best.value or 0.0)
            said = f"the best is job {best.number}, {self._metric} {value}:\n  {command}"
            job_launcher.LAST_WORDS[:] = [said]
        content = {
            "metric": self._metric,
            "direction": self._study.direction.name.lower(),
            "command": command,
            "best": None if best is None else best.number,
            "importance": _importance(self._study),
            "trials": [
                {"number": x.number, "state": x.state.name.lower(), "value": _metric_of(x)}
                | {"params": x.params}
                for x in trials
                if x.state.is_finished()
            ],
        }
        write_whole(self._search.directory / SEARCH_FILE, as_json(content).encode())


def _metric_of(trial: FrozenTrial) -> float | None:
    """The metric; Optuna gives a pruned trial its last report as its value."""
    return trial.value if trial.state.name == "COMPLETE" else None


def _importance(study: optuna.Study) -> dict[str, float]:
    """Share of the metric's variation that each key explains; empty: too few trials."""
    import warnings

    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())
    except (ValueError, RuntimeError):
        return {}
