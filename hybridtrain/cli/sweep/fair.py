"""``experiment=fair_comparison``: each strategy at its best learning rate, over several seeds.

Two sweeps of the launcher's, one after the other. The first searches: for each strategy as many
trainings, at values that do not depend on how others went (evenly spaced; Sobol's sequence where
several keys are searched). So the target can be chosen afterwards, a sweep that was broken off
makes the same jobs, and all strategies try the same values. The second trains the best of each with
new seeds, in turn: hybrid, async, hybrid, async. The jobs are runs of ``experiment=to_target``.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import numpy as np
from omegaconf import OmegaConf

from hybridtrain.cli import config_values, explain, hydra_config
from hybridtrain.cli.config_values import assignments
from hybridtrain.cli.exit_status import CommandOutcome
from hybridtrain.cli.sweep import job_launcher, job_process
from hybridtrain.cli.sweep.search import JobSweeper, checked_job
from hybridtrain.cli.sweep.side_by_side import SweepJob
from hybridtrain.cli.sweep.study import combinations, space_of
from hybridtrain.cli.validation.config_checks import uses_optimizer
from hybridtrain.errors import Lost, UserError
from hybridtrain.report import fair, fair_page
from hybridtrain.report.charts import number
from hybridtrain.report.fair import Goal, Training
from hybridtrain.report.page import write
from hybridtrain.report.runs import as_json, key_of, mapping_in
from hybridtrain.util.files import short
from hybridtrain.util.option_types import Finite, Positive, Range, check, is_number, misfit
from hybridtrain.util.own_directory import OwnDirectory

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

CHOICE_FILE = "chosen.json"
AROUND = 8  # the task's learning rate is divided and multiplied by this
MOST = 1000  # trainings of a search, and of the best that it has found
_LAST_SEED = 2**32 - 1
_OURS = ("compare", "seeds", "seed", "budget", "experiment", "resume", "target.value")
# The comparison's own: with one value, for all strategies.
_ONE = (
    *("seeds", "seed", "budget", "experiment", "resume", "target", "task", "test", "test_only"),
    *("ckpt", "hydra", "trainer.devices", "trainer.num_nodes", "trainer.max_epochs"),
    *("trainer.max_steps", "trainer.max_time", "callbacks.stop", "callbacks.straggler"),
)
_RATES = ("lr", "learning_rate", "optimizer")  # last part of a key

Number = Annotated[int, Range(1, MOST)]


class Budget(TypedDict):
    """``trials``: of each strategy's search; the others: where a training ends at the latest."""

    trials: Number
    epochs: Positive | None
    updates: Positive | None
    seconds: Positive | None


class FairTarget(TypedDict):
    """The value that a metric must reach, with a last worker ``slower`` times as slow."""

    value: Finite | None
    slower: Annotated[float, Range(1)]


@dataclass(frozen=True, slots=True)
class Entry:
    """A strategy as given in ``compare``, the overrides of its jobs, and the values to try."""

    name: str
    overrides: list[str]
    points: list[dict[str, str]]


class FairSweeper(JobSweeper):
    """Compares strategies; the options are those of ``conf/experiment/fair_comparison.yaml``."""

    _measures = False  # a job has ended well, so there is such a metric

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
        given = {x.key_or_group: x for x in config_values.parse(arguments)}
        if "strategy" in given:
            raise UserError(f"{given['strategy'].input_line} was given; name it in 'compare=[…]'")
        for key, x in given.items():
            if x.is_sweep_override() and _is_one(key):
                raise UserError(f"{x.input_line}: a comparison has one {key}")
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
        check("seeds", cfg.seeds, Number, plain=True)
        most = _LAST_SEED - cfg.seeds  # the seeds of the best are the next ones
        check("seed", cfg.seed, Annotated[int, Range(0, most)] | None, plain=True)
        check("target", _plain(cfg.target), FairTarget, plain=True)
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
        kept = [
            x for x in arguments if key_of(x) not in _OURS and not key_of(x).startswith("budget.")
        ]
        epochs, updates, seconds = (self.budget[x] for x in ("epochs", "updates", "seconds"))
        most = epochs or (-1 if updates or seconds else self.sweep_config.trainer.max_epochs)
        ends = [f"trainer.max_epochs={'null' if most is None else most}"]
        ends += [f"trainer.max_steps={updates}"] if updates else []
        ends += [f"trainer.max_time={{seconds:{seconds}}}"] if seconds else []
        return [*kept, "experiment=to_target", *ends]

    def _entry(self, text: str, common: Sequence[str]) -> Entry:
        """Read an entry of ``compare``, and compose a job of it. Raises UserError."""
        try:
            name, *more = words_of(text) or [""]
            if shared := [x for x in more if key_of(x) == "strategy" or _is_one(key_of(x))]:
                raise UserError(
                    f"{shared[0]} cannot be a strategy's own; behind its name are options of "
                    "strategy, optimizer, model, and what is not one for the whole comparison"
                )
            given = hydra_config.complete_overrides([*common, f"strategy={name}", *more])
            given = list({key_of(x): x for x in given}.values())  # the strategy's own are the last
            explain.check_groups(given)
            given += self._around(given)
            space, fixed = space_of(given)
            points = candidates(space, self.budget["trials"], self.seed)
            checked_job(self.launcher, [*fixed, *assignments(points[0])], given)
        except UserError as error:
            raise UserError(f"compare, {text}: {error}") from error
        return Entry(text, fixed, points)

    def _around(self, given: list[str]) -> list[str]:
        """The range to search, around the task's learning rate; none if a rate is searched."""
        swept = [str(x.input_line) for x in config_values.parse(given) if x.is_sweep_override()]
        if any(key_of(x).rpartition(".")[2] in _RATES for x in swept):
            return []
        fixed = [x for x in given if x not in swept]
        cfg = checked_job(self.launcher, fixed, given).config
        lr = cfg.optimizer.get("lr")
        if not uses_optimizer(cfg, "model") or not is_number(lr) or lr <= 0:
            if swept:
                return []
            raise UserError(
                "there is no optimizer.lr to search around; name the learning rate's key and its "
                "range, for example 'model.lr=tag(log, interval(1e-4, 1e-1))'"
            )
        return [f"optimizer.lr=tag(log, interval({lr / AROUND:.3g}, {lr * AROUND:.3g}))"]

    # ---- jobs ----------------------------------------------------------------------------------

    def _search(self) -> list[Training]:
        """Run the searches, a trial of each strategy in turn."""
        entries = self.entries.values()
        most = max(len(x.points) for x in entries)
        tried = [(x, p) for i in range(most) for x in entries for p in x.points[i : i + 1]]
        jobs = [Training(x.name, p, self.seed, str(i)) for i, (x, p) in enumerate(tried)]
        more = [config_values.quoted("task.metric", self.goal.metric), "test=false"]
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
        made = []
        for x in jobs:
            own = [*assignments(x.values), f"seed={x.seed}"]
            overrides = [*self.entries[x.strategy].overrides, *more, *own]
            made.append(self.launcher.job(overrides, int(x.folder), total))
        outcomes = self.launcher.run_all(made, self._see)
        return [
            self._ended(x, job, outcomes[job.number]) for x, job in zip(jobs, made, strict=True)
        ]

    def _ended(self, training: Training, job: SweepJob, end: CommandOutcome) -> Training:
        place = job.folder.relative_to(self.directory).as_posix()
        return replace(training, folder=place, tested=end.metric, error=end.error)

    def _see(self, outcome: CommandOutcome) -> None:
        """End at the first job if it says that there is no such metric."""
        self._measures = self._measures or outcome.exit == 0
        if not self._measures and "the run logged no such metric" in str(outcome.error):
            raise UserError(str(outcome.error))

    def _choice(self, search: list[Training]) -> tuple[Goal, dict[str, dict[str, str] | None]]:
        """The target, and the best values of each strategy: chosen once, also where jobs repeat."""
        path = self.directory / CHOICE_FILE
        goes_on = self.sweep_config.get("resume") is not None
        known = self._chosen_before(path) if goes_on and os.path.lexists(path) else None
        if known is None:
            goal = self.goal
            if goal.target is None:
                goal = replace(goal, target=fair.reachable(search, self.directory, goal))
            jobs = fair.of_strategy([x.measured(self.directory, goal) for x in search])
            best = {name: min(each, key=lambda x: x.rank(goal)) for name, each in jobs.items()}
            chosen = {name: x.values if x.best is not None else None for name, x in best.items()}
            known = {"target": goal.target, "chosen": chosen}
            if any(chosen.values()):
                write(path, as_json(known), "hydra.sweep.dir")
        if not any(known["chosen"].values()):
            raise Lost(f"no job of the searches has logged {self.goal.metric}")
        return replace(self.goal, target=known["target"]), known["chosen"]

    def _chosen_before(self, path: Path) -> dict[str, Any]:
        """Read the choice made before a kill. Raises UserError if it is damaged."""
        with OwnDirectory(path.parent, f"resume={short(path.parent)}") as directory:
            content = mapping_in(directory.text(path.name) or "") or {}
        each = {name: ({"*": str}, NoneType) for name in self.entries}
        fault = misfit(content, {"target": Finite, "chosen": each}, CHOICE_FILE)
        if fault is None:
            for name, entry in self.entries.items():
                if content["chosen"][name] not in (None, *entry.points):
                    fault = f"{CHOICE_FILE}: {name} has values that its search has not tried"
        if fault is not None:
            raise UserError(
                f"resume={short(self.directory)}: {fault}; remove {short(path)}, and the searches "
                "choose again"
            )
        return content

    # ---- the end -------------------------------------------------------------------------------

    def _content(
        self, goal: Goal, chosen: Mapping[str, Any], search: list[Training], runs: list[Training]
    ) -> dict[str, Any]:
        """The content of ``fair_comparison.json``."""
        rows = fair.rows_of({x: [y for y in runs if y.strategy == x] for x in self.entries})
        for row in rows:
            name, values = row["strategy"], chosen[row["strategy"]]
            options = [*self.entries[name].overrides, _target(goal), *assignments(values or {})]
            row |= {"values": values, "command": job_process.command_of(options)}
        return {
            **asdict(goal),
            "tested": self.sweep_config.task.metric,
            "budget": self.budget,
            "at_once": self.launcher.at_once,
            "protocol": self._protocol(goal, search),
            "said": [*fair.conclusions(rows, goal), *self._remarks(chosen, search, runs)],
            "strategies": rows,
            "runs": [asdict(x) for x in runs],
            "search": [{k: v for k, v in asdict(x).items() if k != "tested"} for x in search],
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
        """Warnings beside the figures: ends of ranges, failed and late runs, shared cores."""
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
        every = [dict.fromkeys(space, x) for x in snapped]
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.QMCSampler(seed=seed, scramble=True)
        study = optuna.create_study(sampler=sampler)
        for _ in range(n):
            study.tell(study.ask(dict(space)), 0.0)
        every = [x.params for x in study.get_trials()]
    texts = {key: _texts([p[key] for p in every]) for key in space}
    points = [dict(zip(texts, each, strict=True)) for each in zip(*texts.values(), strict=True)]
    return [p for i, p in enumerate(points) if p not in points[:i]]


def _texts(values: Sequence[Any]) -> list[str]:
    """Whole numbers whole; others with three digits, or as many as keep neighbours well apart."""
    if not all(isinstance(x, float) for x in values):
        return [str(x) for x in values]
    apart = sorted({*values})
    gaps = [math.inf, *(b - a for a, b in pairwise(apart)), math.inf]
    near = {x: min(gaps[i : i + 2]) for i, x in enumerate(apart)}
    for digits in range(3, 18):
        texts = [f"{x:.{digits}g}" for x in values]
        if all(abs(float(t) - x) <= near[x] / 20 for t, x in zip(texts, values, strict=True)):
            break
    return texts


def words_of(text: str) -> list[str]:
    """Split at blanks, but for those in brackets and quotes. Raises UserError if one is open."""
    words, depth, quote = [""], 0, ""
    for x in text:
        if quote or x in "\"'":
            quote = "" if x == quote else quote or x
        else:
            depth += (x in "([{") - (x in ")]}")
        if x.isspace() and not quote and depth <= 0:
            words.append("")
        else:
            words[-1] += x
    if quote or depth:
        raise UserError(f"{'a quote' if quote else 'a bracket'} is not closed, or not opened")
    return [x[1:-1] if x[0] in "\"'" and x[0] == x[-1] else x for x in words if x]


def _target(goal: Goal) -> str:
    return f"target.value={'null' if goal.target is None else goal.target}"


def _is_one(key: str) -> bool:
    """Whether the key is the comparison's own."""
    return any(key == x or key.startswith((f"{x}.", f"{x}/")) for x in _ONE)


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _between(goal: Goal, chosen: Mapping[str, dict[str, str] | None]) -> str:
    """Printed after the searches."""
    best = [f"{name}: {fair_page.found(values)}" for name, values in chosen.items()]
    return f"\ntarget: {goal}; the best of the searches: {'; '.join(best)}\n"
