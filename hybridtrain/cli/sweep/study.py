"""The study of a search: its space, and the trials that are asked of it.

The syntax of a search space is that of Hydra's own Optuna sweeper. All that has to survive is in
Optuna's storage: a trial that a kill has left RUNNING keeps its number and values, and goes on in
its directory. Each trial is drawn with a generator of its own, seeded with the search's seed and
the trial's number: so a sampler has no state but the trials before, and a search that was broken
off draws what it would have drawn.

Other programs, and other users, may write to a study. So a trial counts only if all its names and
values are of the search space: they become overrides of a job, which can name any class.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hydra.core.override_parser.types import Override

from hybridtrain.cli import config_values, explain
from hybridtrain.engine.monitoring.watchdog import to_stderr
from hybridtrain.errors import UserError
from hybridtrain.report.runs import JOBS_FILE, read_mapping
from hybridtrain.util.files import short
from hybridtrain.util.option_types import is_number, shown

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial, Trial

STUDY_FILE = "study.db"
DEFAULT_TRIALS, MOST_IN_GRID = 20, 10_000
Sampling = Literal["tpe", "random", "grid"]


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


def _has(each: Any, value: Any) -> bool:
    """Whether a distribution has this value."""
    if hasattr(each, "choices"):
        return isinstance(value, str) and value in each.choices
    whole = type(each.low) is int and type(each.high) is int
    if not is_number(value) or (whole and type(value) is not int):
        return False
    steps = 0.0 if each.step is None else (value - each.low) / each.step
    return bool(each.low <= value <= each.high) and abs(steps - round(steps)) < 1e-6


def _check_size(n: int) -> None:
    if n > MOST_IN_GRID:
        raise UserError(f"hydra.sweeper.sampler=grid: {n} combinations; {MOST_IN_GRID} at most")


def combinations(space: Mapping[str, BaseDistribution]) -> list[dict[str, Any]]:
    """All points of a grid. Raises UserError if they are too many, or infinitely many."""
    values = [_grid_of(key, each) for key, each in space.items()]
    _check_size(math.prod(map(len, values)))
    return [dict(zip(space, each, strict=True)) for each in itertools.product(*values)]


def check_trials(study: optuna.Study, directory: Path) -> None:
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


def seed_of(study: optuna.Study, seed: int | None) -> int:
    if "seed" not in study.user_attrs:
        study.set_user_attr("seed", time.time_ns() % 2**32 if seed is None else seed)
    return int(study.user_attrs["seed"])


@contextmanager
def reading(study: optuna.Study) -> Iterator[None]:
    """Turn the errors of a study's content, which other programs may have written, into one line.

    Raises:
        UserError: naming the study.
    """
    from optuna.exceptions import StorageInternalError

    try:
        yield
    except (UserError, StorageInternalError, OSError):
        raise
    except Exception as error:  # Optuna's readers raise whatever they stumble over
        raise UserError(
            f"the study {study.study_name} has entries that no search has written "
            f"({type(error).__name__}: {explain.one_line(error)[:100]}); restore it, or choose "
            "another hydra.sweeper.study_name"
        ) from error


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
        if not isinstance(then, Mapping):
            raise TypeError(f"space is {shown(then)}")
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
        trials = self.study.get_trials()
        foreign = {x.number: fault for x in trials if (fault := self.misfit(x)) is not None}
        known = [x for x in trials if x.number not in foreign]
        unfinished = [x for x in known if x.state == self.states.RUNNING]
        mine = unfinished if alone else [x for x in unfinished if self._is_mine(x)]
        self._left = [x for x in mine if x.params.keys() == self.space.keys()]
        cut_short = [x for x in mine if x not in self._left]  # a kill while it was drawn
        for trial in cut_short:
            self.study.tell(trial.number, state=self.states.FAIL)
        self.before = [x for x in known if x.state.is_finished()]
        begun = sum(trials[number].state != self.states.WAITING for number in foreign)
        self._n_void = begun + len(cut_short)  # others replace them
        if foreign:
            self._tell_foreign(foreign)
        if self._sampler == "grid":
            n_grid = self._enqueue_grid()
            n_trials = min(n_trials or n_grid, n_grid)
        self.n_trials = n_trials or DEFAULT_TRIALS

    def _is_mine(self, trial: FrozenTrial) -> bool:
        return bool(trial.user_attrs.get("directory") == self._here)

    def misfit(self, trial: FrozenTrial | Trial) -> str | None:
        """A name or value that the search space does not have; ``None``: all are of the space.

        Nothing else becomes an override of a job: whoever can write to the study would choose its
        classes.
        """
        for key, value in trial.params.items():
            if key not in self.space or not _has(self.space[key], value):
                return f"{shown(key, plain=True)}={shown(value)}"
        return None

    def _tell_foreign(self, faults: Mapping[int, str]) -> None:
        number, fault = next(iter(faults.items()))
        to_stderr(
            f"the study {self.study.study_name}: {len(faults)} of its trials have names or values "
            f"that are not of this search, and are passed over: trial {number}, {fault}"
        )

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
        while not self._has_enough():
            if (trial := self._ask()) is not None:
                return trial, False
        return None

    def _ask(self) -> Trial | None:
        """A new trial; None: another program has enqueued one that is not of this search."""
        self.study.sampler = self._fresh_sampler(len(self.study.get_trials(deepcopy=False)))
        with reading(self.study):
            trial = self.study.ask(self.space)
        if (fault := self.misfit(trial)) is None:
            trial.set_user_attr("directory", self._here)
            return trial
        self._tell_foreign({trial.number: fault})
        self.study.tell(trial, state=self.states.FAIL)
        self._n_void += 1
        return None

    def _has_enough(self) -> bool:
        """Whether no trial is left to begin; other sweeps may ask the same study."""
        trials = self.study.get_trials(deepcopy=False)
        waiting = sum(x.state == self.states.WAITING for x in trials)
        failed = sum(x.state == self.states.FAIL for x in self.before)  # others replace them
        if self._sampler == "grid" and not waiting:
            return True
        return len(trials) - waiting - failed - self._n_void >= self.n_trials

    def best(self) -> FrozenTrial | None:
        """The finished trial of this search's space with the best value; None: there is none."""
        choose = min if self.study.direction.name == "MINIMIZE" else max
        done = self.study.get_trials(deepcopy=False, states=(self.states.COMPLETE,))
        known = [x for x in done if x.values and self.misfit(x) is None]
        return choose(known, key=lambda x: float(x.value or 0.0), default=None)

    def _fresh_sampler(self, number: int) -> optuna.samplers.BaseSampler:
        from optuna import samplers

        drawn = hashlib.sha256(f"{self._seed} {number}".encode()).digest()
        seed = int.from_bytes(drawn[:4])
        made = samplers.TPESampler if self._sampler == "tpe" else samplers.RandomSampler
        return made(seed=seed)
