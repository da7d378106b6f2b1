"""``experiment=fair_comparison``: each strategy at its best learning rate, over several seeds.

Two sweeps of the launcher's, one after the other. The first searches: for each strategy as many
trainings, at values that do not depend on how others went (evenly spaced; Sobol's sequence where
several keys are searched). So the target can be chosen afterwards, a sweep that was broken off
makes the same jobs, and all strategies try the same values. The second trains the best of each with
new seeds, in turn: hybrid, async, hybrid, async. The jobs are runs of ``experiment=to_target``.
"""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from hybridtrain.cli import explain, hydra_config
from hybridtrain.cli.exit_status import CommandOutcome
from hybridtrain.cli.sweep import job_launcher, job_process
from hybridtrain.cli.sweep.job_launcher import ProcessLauncher
from hybridtrain.cli.sweep.search import checked_job, combinations, process_launcher, space_of
from hybridtrain.errors import Lost, UserError
from hybridtrain.report import fair, fair_page
from hybridtrain.report.charts import number
from hybridtrain.report.fair import Goal, Training
from hybridtrain.report.page import write
from hybridtrain.report.runs import as_json, read_mapping
from hybridtrain.util.files import short
from hybridtrain.util.option_types import Positive, check, is_number

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

CHOICE_FILE = "chosen.json"
AROUND = 8  # the task's learning rate is divided and multiplied by this
_OURS = ("compare", "seeds", "seed", "budget", "experiment", "resume", "target.value")
_ONE = ("seeds", "seed", "target.value", "task", "experiment")


class Budget(TypedDict):
    """``trials``: of each strategy's search; the others: where a training ends at the latest."""

    trials: Positive
    epochs: Positive | None
    updates: Positive | None
    seconds: Positive | None


@dataclass(frozen=True, slots=True)
class Entry:
    """A strategy as given in ``compare``, the overrides of its jobs, and the values to try."""

    name: str
    overrides: list[str]
    points: list[dict[str, str]]


class FairSweeper(Sweeper):
    """Compares strategies; the options are those of ``conf/experiment/fair_comparison.yaml``."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Called by Hydra before the sweep."""
        self.sweep_config = config
        found = process_launcher(hydra_context, task_function, config)
        self.launcher: ProcessLauncher = found
        self.directory = Path(str(config.hydra.sweep.dir))
        self._measures = False

    def sweep(self, arguments: list[str]) -> None:
        """Search, choose, train the best with each seed. Raises UserError before a job starts."""
        import optuna
        import scipy  # noqa: F401

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.launcher.begin()
        names = self._read(arguments)
        self.entries = {x: self._entry(x, self._common(arguments)) for x in names}
        search = self._search()
        goal, chosen = self._choice(search)
        search = [x.measured(self.directory, goal) for x in search]
        print(_between(goal, chosen), flush=True)
        runs = self._runs(goal, chosen, len(search))
        content = self._content(goal, chosen, search, runs)
        fair_page.leave(self.directory, content)
        where = short(self.directory / fair_page.TABLE)
        words = [fair_page.table(content), *content["said"], f"the table: {where}"]
        job_launcher.LAST_WORDS[:] = ["\n" + "\n".join(words)]

    # ---- options -------------------------------------------------------------------------------

    def _read(self, arguments: Sequence[str]) -> list[str]:
        """Check the options; returns the entries of ``compare``. Raises UserError."""
        cfg: Any = self.sweep_config
        if "compare" not in cfg or "budget" not in cfg:
            raise UserError(
                f"hydra/sweeper=fair comes with experiment={hydra_config.COMPARISON}; give that"
            )
        given = {x.key_or_group: x for x in hydra_config.parse(arguments)}
        if "strategy" in given:
            raise UserError(f"{given['strategy'].input_line} was given; name it in 'compare=[…]'")
        if several := [x for x in _ONE if x in given and given[x].is_sweep_override()]:
            raise UserError(f"{given[several[0]].input_line}: a comparison has one {several[0]}")
        names = _plain(cfg.compare)
        if "compare" in given and given["compare"].is_sweep_override():
            names = list(given["compare"].sweep_string_iterator())
        check("compare", names, Sequence[str], plain=True)
        if len(names) < 2 or len({*names}) < len(names):
            raise UserError(
                f"compare=[{','.join(names)}] was given; it must be two strategies or more, each "
                "once, as in 'compare=[hybrid,\"backup strategy.policy.k=3\"]'"
            )
        self.budget = _plain(cfg.budget)
        check("budget", self.budget, Budget, plain=True)
        check("seeds", cfg.seeds, Positive, plain=True)
        check("target.value", cfg.target.value, float | None, plain=True)
        if cfg.task.monitor is None:
            raise UserError(
                "task.monitor=null: a target is a value of a metric; name one that the module logs "
                "in its validations with task.monitor=…, and its direction with task.mode=min|max"
            )
        self.goal = Goal(str(cfg.task.monitor), str(cfg.task.mode), cfg.target.value)
        self.seed = int(cfg.seed or 0)
        return names

    def _common(self, arguments: Sequence[str]) -> list[str]:
        """The overrides of all jobs: those given, and the end of a training."""
        kept = [x for x in arguments if _key(x) not in _OURS and not _key(x).startswith("budget.")]
        epochs, updates, seconds = (self.budget[x] for x in ("epochs", "updates", "seconds"))
        most = epochs or (-1 if updates or seconds else self.sweep_config.trainer.max_epochs)
        ends = [f"trainer.max_epochs={'null' if most is None else most}"]
        ends += [f"trainer.max_steps={updates}"] if updates else []
        ends += [f"trainer.max_time={{seconds:{seconds}}}"] if seconds else []
        return [*kept, "experiment=to_target", *ends]

    def _entry(self, text: str, common: Sequence[str]) -> Entry:
        """Read an entry of ``compare``, and compose a job of it. Raises UserError."""
        name, *more = shlex.split(text) or [""]
        given = [*common, f"strategy={name}", *more]
        try:
            explain.check_groups(given)
            if not any(x.is_sweep_override() for x in hydra_config.parse(given)):
                given.append(self._around(given))
            space, fixed = space_of(given)
            points = candidates(space, self.budget["trials"], self.seed)
            checked_job(self.launcher, [*fixed, *_overrides(points[0])], given)
        except UserError as error:
            raise UserError(f"compare, {text}: {error}") from error
        return Entry(text, fixed, points)

    def _around(self, given: list[str]) -> str:
        """The range to search, around the task's learning rate."""
        cfg = checked_job(self.launcher, given, given).config
        lr = cfg.optimizer.get("lr")
        if "${optimizer}" not in OmegaConf.to_yaml(cfg.model) or not is_number(lr) or lr <= 0:
            raise UserError(
                "there is no optimizer.lr to search around; name the learning rate's key and its "
                "range, for example 'model.lr=tag(log, interval(1e-4, 1e-1))'"
            )
        return f"optimizer.lr=tag(log, interval({lr / AROUND:.3g}, {lr * AROUND:.3g}))"

    # ---- jobs ----------------------------------------------------------------------------------

    def _search(self) -> list[Training]:
        """Run the searches, a trial of each strategy in turn."""
        entries = self.entries.values()
        most = max(len(x.points) for x in entries)
        tried = [(x, p) for i in range(most) for x in entries for p in x.points[i : i + 1]]
        jobs = [Training(x.name, p, self.seed, str(i)) for i, (x, p) in enumerate(tried)]
        more = [hydra_config.quoted("task.metric", self.goal.metric), "test=false"]
        total = len(jobs) + len(entries) * int(self.sweep_config.seeds)
        return self._train(jobs, [*more, _target(self.goal)], total)

    def _runs(self, goal: Goal, chosen: Mapping[str, Any], first: int) -> list[Training]:
        """Train the best of each strategy with each seed, one strategy after the other."""
        seeds = range(self.seed + 1, self.seed + 1 + int(self.sweep_config.seeds))
        each = [(x, seed) for seed in seeds for x in self.entries if chosen[x] is not None]
        jobs = [Training(x, chosen[x], n, str(first + i)) for i, (x, n) in enumerate(each)]
        runs = self._train(jobs, [_target(goal)], first + len(jobs))
        return [x.measured(self.directory, goal) for x in runs]

    def _train(self, jobs: list[Training], more: list[str], total: int) -> list[Training]:
        """Run the jobs that have not finished before; returns them with what they returned."""
        made = [
            self.launcher.job(
                [
                    *self.entries[x.strategy].overrides,
                    *more,
                    *_overrides(x.values),
                    f"seed={x.seed}",
                ],
                int(x.folder),
                total,
            )
            for x in jobs
        ]
        outcomes = self.launcher.run_all(made, self._see)
        ends = [outcomes[job.number] for job in made]
        return [replace(x, tested=e.metric, error=e.error) for x, e in zip(jobs, ends, strict=True)]

    def _see(self, outcome: CommandOutcome) -> None:
        """End at the first job if it says that there is no such metric."""
        self._measures = self._measures or outcome.exit == 0
        if not self._measures and "the run logged no such metric" in str(outcome.error):
            raise UserError(str(outcome.error))

    def _choice(self, search: list[Training]) -> tuple[Goal, dict[str, dict[str, str] | None]]:
        """The target, and the best values of each strategy: chosen once, also where jobs repeat."""
        path = self.directory / CHOICE_FILE
        known = read_mapping(path, []) if self.sweep_config.get("resume") is not None else {}
        if not known:
            goal = self.goal
            if goal.target is None:
                goal = replace(goal, target=fair.reachable(search, self.directory, goal))
            jobs = fair.of_strategy([x.measured(self.directory, goal) for x in search])
            best = {name: min(each, key=lambda x: x.rank(goal)) for name, each in jobs.items()}
            chosen = {name: x.values if x.best is not None else None for name, x in best.items()}
            if not any(chosen.values()):
                raise Lost(f"no job of the searches has logged {goal.metric}")
            known = {"target": goal.target, "chosen": chosen}
            write(path, as_json(known), "hydra.sweep.dir")
        return replace(self.goal, target=known["target"]), known["chosen"]

    # ---- the end -------------------------------------------------------------------------------

    def _content(
        self, goal: Goal, chosen: Mapping[str, Any], search: list[Training], runs: list[Training]
    ) -> dict[str, Any]:
        """What ``fair_comparison.json`` says."""
        rows = fair.rows_of({x: [y for y in runs if y.strategy == x] for x in self.entries})
        for row in rows:
            name, values = row["strategy"], chosen[row["strategy"]]
            options = [*self.entries[name].overrides, _target(goal), *_overrides(values or {})]
            words = ["python", "-m", "hybridtrain", *job_process.FLAGS, *options]
            row |= {"values": values, "command": shlex.join(words)}
        return {
            **asdict(goal),
            "tested": self.sweep_config.task.metric,
            "budget": self.budget,
            "at_once": self.launcher.at_once,
            "protocol": self._protocol(goal, search),
            "said": [*fair.conclusions(rows, goal), *self._remarks(chosen, search, runs)],
            "strategies": rows,
            "runs": [asdict(x) for x in runs],
            "search": [asdict(x) for x in search],
        }

    def _protocol(self, goal: Goal, search: list[Training]) -> str:
        n, seeds = max(len(x.points) for x in self.entries.values()), int(self.sweep_config.seeds)
        keys = ", ".join(dict.fromkeys(key for x in search for key in x.values))
        how = (
            "given" if self.goal.target is not None else "what each search's best job reached early"
        )
        return (
            f"Each strategy: {n} trainings to find {keys} (seed {self.seed}), then {seeds} with "
            f"the best, seeds {self.seed + 1} to {self.seed + seeds}. The target, {goal}: {how}. "
            "Medians over the seeds, and 95 % bootstrap intervals of them; ratios seed by seed."
        )

    def _remarks(
        self, chosen: Mapping[str, Any], search: list[Training], runs: list[Training]
    ) -> Iterator[str]:
        """What a reader has to know besides the figures."""
        for name, jobs in fair.of_strategy(search).items():
            for key in fair.at_an_end(jobs, chosen[name] or {}):
                best = f"{key}={chosen[name][key]}"
                yield f"{name}: {best} is the best, at an end of what was tried: search further"
        for x in runs:
            if x.samples is None or x.error:
                why = x.error or ("" if x.best is None else f"its best is {number(x.best)}")
                never = "" if x.samples is not None else " never reached the target"
                yield f"{x.strategy}, seed {x.seed}:{never} {f'({why})' if why else ''}".rstrip()
        if self.launcher.at_once != 1:
            yield "jobs ran side by side: times are those of a shared machine (samples are not)"


def candidates(space: Mapping[str, BaseDistribution], n: int, seed: int) -> list[dict[str, str]]:
    """At most ``n`` points: all, or an interval evenly, or of several keys by Sobol's sequence."""
    import optuna

    try:
        every = combinations(space)
    except UserError:  # infinitely many
        every = []
    each: Any = next(iter(space.values()))
    if 0 < len(every) <= n:
        pass
    elif len(space) == 1 and hasattr(each, "low"):
        along = np.geomspace if each.log else np.linspace
        values = along(each.low, each.high, n) if n > 1 else along(each.low, each.high, 3)[1:2]
        low, step = each.low, each.step
        snapped = [x if step is None else low + round((x - low) / step) * step for x in values]
        every = [dict.fromkeys(space, x) for x in dict.fromkeys(snapped)]
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.QMCSampler(seed=seed, scramble=True)
        study = optuna.create_study(sampler=sampler)
        for _ in range(n):
            study.tell(study.ask(dict(space)), 0.0)
        every = [x.params for x in study.get_trials()]
    return [{k: x if isinstance(x, str) else f"{x:.3g}" for k, x in p.items()} for p in every]


def _overrides(values: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in values.items()]


def _target(goal: Goal) -> str:
    return f"target.value={'null' if goal.target is None else goal.target}"


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _between(goal: Goal, chosen: Mapping[str, dict[str, str] | None]) -> str:
    """Printed after the searches."""
    best = [f"{name}: {fair_page.found(values)}" for name, values in chosen.items()]
    return f"\ntarget: {goal}; the best of the searches: {'; '.join(best)}\n"
