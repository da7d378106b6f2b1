"""``hydra/sweeper=optuna``: a search by Optuna's ask and tell, over any keys, on our own launcher.

The syntax of a search space is that of Hydra's own Optuna sweeper. All that has to survive is in
Optuna's storage: a trial that a kill has left RUNNING keeps its number and values, and goes on in
its directory. Each trial is drawn with a generator of its own, seeded with the search's seed and
the trial's number: so a sampler has no state but the trials before, and a search that was broken
off draws what it would have drawn.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from hybridtrain.cli import config_values, explain
from hybridtrain.cli.config_values import assignments
from hybridtrain.cli.exit_status import CommandOutcome
from hybridtrain.cli.sweep import job_launcher, job_process, resumed
from hybridtrain.cli.sweep.job_launcher import ProcessLauncher, check_job
from hybridtrain.cli.sweep.side_by_side import Job
from hybridtrain.cli.validation.host_checks import check_directory
from hybridtrain.cli.validation.target_checks import check_scheme
from hybridtrain.errors import Lost, UserError
from hybridtrain.report import charts
from hybridtrain.report.runs import JOBS_FILE, as_json, brief, read_mapping
from hybridtrain.report.search import SEARCH_FILE
from hybridtrain.util.files import short, write_whole
from hybridtrain.util.option_types import Natural, Positive, typed

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial, Trial

    from hybridtrain.cli.sweep.reports import Mailbox

STUDY_FILE, STUDY = "study.db", "search"
DEFAULT_TRIALS, MOST_IN_GRID = 20, 10_000
Sampling = Literal["tpe", "random", "grid"]


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
            _check_trials(study, directory)
            search = Search(study, space, self.sampler, _seed_of(study, self.seed), directory)
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
    ) -> Job:
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


def checked_job(launcher: ProcessLauncher, overrides: list[str], given: Sequence[str]) -> Job:
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


# ---- search space -------------------------------------------------------------------------------


def space_of(overrides: Sequence[str]) -> tuple[dict[str, BaseDistribution], list[str]]:
    """The distribution of each key that is searched, and the other overrides; the last one counts.

    Raises:
        UserError: if nothing is searched.
    """
    found = {x.get_key_element(): x for x in config_values.parse(overrides)}
    space = {}
    for key, override in found.items():
        try:
            if override.is_sweep_override():
                space[key] = _distribution(override)
        except (ValueError, TypeError) as error:
            raise UserError(f"{override.input_line}: {explain.one_line(error)}") from error
    if not space:
        raise UserError(
            "hydra/sweeper=optuna: no key has several values; give for example "
            "'optimizer.lr=tag(log, interval(1e-4, 1e-1))' or strategy=hybrid,async"
        )
    fixed = [
        f"{key}={x.get_value_element_as_str()}" if not x.is_delete() else str(x.input_line)
        for key, x in found.items()
        if key not in space
    ]
    return space, fixed


def _distribution(override: Override) -> BaseDistribution:
    from optuna import distributions as of

    value: Any = override.value()
    if override.is_interval_sweep():
        log, ends = "log" in value.tags, (value.start, value.end)
        if not all(map(math.isfinite, (*ends, value.end - value.start))):
            raise UserError("an interval has finite ends")
        whole = all(isinstance(x, int) for x in ends)
        kind: Any = of.IntDistribution if whole else of.FloatDistribution
        return kind(*ends, log=log)
    if override.is_range_sweep() and not value.shuffle:
        whole = all(isinstance(x, int) for x in (value.start, value.stop, value.step))
        kind = of.IntDistribution if whole else of.FloatDistribution
        return kind(value.start, value.stop, step=value.step)
    # As texts: what Hydra would write on the command line is not always a value of Optuna's.
    return of.CategoricalDistribution(tuple(override.sweep_string_iterator()))


def _grid_of(key: str, each: Any) -> Sequence[Any]:
    """All values of a key, for a grid. Raises UserError for an interval of real numbers."""
    if hasattr(each, "choices"):
        return list(each.choices)
    step = getattr(each, "step", None)
    if step is None:
        raise UserError(
            f"hydra.sweeper.sampler=grid: {key} is an interval of real numbers; give values, or "
            "range(low, high, step)"
        )
    n = int((each.high - each.low) / step + 1e-9) + 1
    _check_size(n)
    return [each.low + i * step for i in range(n)]


def _check_size(n: int) -> None:
    if n > MOST_IN_GRID:
        raise UserError(f"hydra.sweeper.sampler=grid: {n} combinations; {MOST_IN_GRID} at most")


def combinations(space: Mapping[str, BaseDistribution]) -> list[dict[str, Any]]:
    """All points of a grid. Raises UserError if they are too many, or infinitely many."""
    values = [_grid_of(key, each) for key, each in space.items()]
    _check_size(math.prod(map(len, values)))
    return [dict(zip(space, each, strict=True)) for each in itertools.product(*values)]


def _check_trials(study: optuna.Study, directory: Path) -> None:
    """Check that the study knows all finished jobs of the sweep's directory, with their values.

    Raises:
        UserError: if it is lost or damaged, as those jobs would run again.
    """
    endings = read_mapping(directory / JOBS_FILE, []).values()
    finished = sum(isinstance(each, dict) and each.get("exit") == 0 for each in endings)
    trials = [x for x in study.get_trials() if x.state.is_finished()]
    lacking = [x.number for x in trials if x.state.name == "COMPLETE" and not x.values]
    if len(trials) < finished or lacking:
        lost = f"has no value of trial {lacking[0]}" if lacking else f"has {len(trials)} trials"
        raise UserError(
            f"the study {study.study_name} {lost}, but {short(directory / JOBS_FILE)} has "
            f"{finished} finished jobs, which would run again; restore {STUDY_FILE}, or name the "
            "storage and study as before; or begin anew in another hydra.sweep.dir"
        )


def _turned(task: Any, direction: str) -> bool:
    """Whether ``task.monitor``, which pruners judge by, has another direction than the study."""
    monitors = task.monitor is not None and task.monitor != task.metric
    return monitors and (task.mode == "max") != (direction == "maximize")


def _seed_of(study: optuna.Study, seed: int | None) -> int:
    if "seed" not in study.user_attrs:
        study.set_user_attr("seed", time.time_ns() % 2**32 if seed is None else seed)
    return int(study.user_attrs["seed"])


# ---- the trials ---------------------------------------------------------------------------------


class Search:
    """Asks a study for trials, in their order, for a sweep in ``directory``."""

    def __init__(
        self,
        study: optuna.Study,
        space: dict[str, BaseDistribution],
        sampler: Sampling,
        seed: int,
        directory: Path,
    ) -> None:
        from optuna.distributions import distribution_to_json
        from optuna.trial import TrialState

        self.study, self.space, self.directory = study, space, directory
        self.states = TrialState
        self._sampler, self._seed = sampler, seed
        self._here = str(directory.absolute())
        now = {key: distribution_to_json(each) for key, each in space.items()}
        then = study.user_attrs.setdefault("space", now)
        if then != now:
            other = sorted(k for k in {*then, *now} if then.get(k) != now.get(k))
            raise UserError(
                f"the study {study.study_name} has another search space: {', '.join(other)} "
                f"{'differs' if len(other) == 1 else 'differ'}; search the same keys and values, "
                "or choose another hydra.sweeper.study_name"
            )
        study.set_user_attr("space", now)

    def prepare(self, n_trials: int | None, alone: bool = False) -> None:
        """Count what is left to do: trials that a kill left unfinished come first.

        ``alone``: no other sweep has trials of this study; the directory may have moved.
        """
        unfinished = self.study.get_trials(states=(self.states.RUNNING,))
        mine = [x for x in unfinished if x.user_attrs.get("directory") == self._here]
        self._left = unfinished if alone else mine
        self.before = [x for x in self.study.get_trials() if x.state.is_finished()]
        if self._sampler == "grid":
            n_grid = self._enqueue_grid()
            n_trials = min(n_trials or n_grid, n_grid)
        self.n_trials = n_trials or DEFAULT_TRIALS

    def _enqueue_grid(self) -> int:
        """Every combination not yet tried waits; those that failed wait again."""
        grid = combinations(self.space)
        known = [x for x in self.study.get_trials() if x.state != self.states.FAIL]
        tried = [x.system_attrs.get("fixed_params", x.params) for x in known]
        for params in grid:
            if params not in tried:
                self.study.enqueue_trial(params)
        return len(grid)

    def next(self) -> tuple[Trial, bool] | None:
        """The next trial, and whether it has begun before; None: there is none."""
        from optuna.trial import Trial

        if self._left:
            return Trial(self.study, self._left.pop(0)._trial_id), True
        if self._has_enough():
            return None
        self.study.sampler = self._fresh_sampler(len(self.study.get_trials(deepcopy=False)))
        trial = self.study.ask(self.space)
        trial.set_user_attr("directory", self._here)
        return trial, False

    def _has_enough(self) -> bool:
        """Whether no trial is left to begin; other sweeps may ask the same study."""
        trials = self.study.get_trials(deepcopy=False)
        waiting = sum(x.state == self.states.WAITING for x in trials)
        failed = sum(x.state == self.states.FAIL for x in self.before)  # others replace them
        if self._sampler == "grid" and not waiting:
            return True
        return len(trials) - waiting - failed >= self.n_trials

    def _fresh_sampler(self, number: int) -> optuna.samplers.BaseSampler:
        from optuna import samplers

        drawn = hashlib.sha256(f"{self._seed} {number}".encode()).digest()
        seed = int.from_bytes(drawn[:4])
        made = samplers.TPESampler if self._sampler == "tpe" else samplers.RandomSampler
        return made(seed=seed)


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
        if self._winner() is None:
            raise Lost("no job of the search has returned a metric")

    def _job(self, trial: FrozenTrial | Trial, more: Sequence[str] = ()) -> Job:
        overrides = [*self._fixed, *assignments(trial.params)]
        return self._launcher.job(overrides, trial.number, self._search.n_trials, more)

    def _ending(self, trial: FrozenTrial, folder: Path) -> CommandOutcome:
        """The outcome of a trial that was finished before the search went on."""
        done = trial.state == self._states.COMPLETE
        why = "" if done else f"{trial.state.name.lower()} before the search went on"
        # Another trial replaces one that had failed, which would else count for ever.
        return CommandOutcome(0, _metric_of(trial), why or None, short(folder))

    def _jobs(self) -> Iterator[Job]:
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
            self._shown.draw(self._study.get_trials(deepcopy=False), self._metric, self._winner())

    def _ended(self, job: Job, outcome: CommandOutcome) -> CommandOutcome:
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

    def _winner(self) -> FrozenTrial | None:
        try:
            return self._study.best_trial
        except ValueError:
            return None

    def _leave(self) -> None:
        """Write what the page shows of the search, and print the winner's command."""
        best, trials = self._winner(), self._study.get_trials(deepcopy=False)
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
