"""A fair comparison of strategies: time and samples to a target, over seeds, with intervals.

The protocol is that of AlgoPerf (Dahl et al. 2023, arXiv:2306.07179): every entry is tuned under
one budget, then its best setting is trained anew, and what counts is the time to a target. Medians,
because a run that never reaches the target is longer than all that do: nothing has to be left out
(a median exists where more than half have reached it). Intervals are percentile bootstraps of the
median (Efron 1979), by SciPy. Two strategies are compared seed by seed: a seed means the same
initial weights and order of samples, and its runs follow one another on the machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Context
from pathlib import Path
from typing import Any

import numpy as np

from hybridtrain.report.charts import number
from hybridtrain.report.history import RunCurve, read_history

CONFIDENCE, RESAMPLES = 0.95, 9999
LEAST_SEEDS = 5  # to tell strategies apart: of fewer, all agree by chance too often
EARLY = 0.75  # of a training: what is reached by then can be reached with another seed, too
AT = ("train_s", "wall_s", "samples", "updates")  # where a run was when it reached the target
COMPARED = ("train_s", "samples")
_NEVER, _FINITE = 1e100, 1e50  # where a run was that never reached it; whatever is below, did


@dataclass(frozen=True, slots=True)
class Goal:
    """A value of a logged metric; ``mode``: whether ``min`` or ``max`` of it is good."""

    metric: str
    mode: str
    target: float | None = None

    @property
    def sign(self) -> int:
        """Times the metric, small is good."""
        return -1 if self.mode == "max" else 1

    def costs(self, curve: RunCurve) -> list[float]:
        """The metric of each row, times the sign; nan: there was no validation."""
        return [self.sign * x for x in curve.columns.get(self.metric, [])]

    def __str__(self) -> str:
        sign = "≥" if self.mode == "max" else "≤"
        return f"{self.metric} {sign} {number(self.target or 0.0)}"


@dataclass(frozen=True, slots=True)
class Training:
    """A job of a comparison, and where it was when it reached the target (None: it did not).

    ``train_s``: start-up and validations left out. ``best``: value of the goal's metric.
    ``tested``: the metric that the job returned.
    """

    strategy: str
    values: dict[str, str]
    seed: int
    folder: str
    train_s: float | None = None
    wall_s: float | None = None
    samples: float | None = None
    updates: float | None = None
    best: float | None = None
    tested: float | None = None
    error: str | None = None

    def measured(self, directory: Path, goal: Goal) -> Training:
        """Find in its history the first validation that is as good as the target."""
        curve = read_history(directory / self.folder)
        costs = goal.costs(curve)
        known = [i for i, x in enumerate(costs) if math.isfinite(x)]
        limit = None if goal.target is None else goal.sign * goal.target
        good = [i for i in known if limit is not None and costs[i] <= limit]
        at: dict[str, Any] = {name: curve.columns[name][good[0]] for name in AT} if good else {}
        best = goal.sign * min(costs[i] for i in known) if known else None
        return replace(self, **at, best=best)

    def rank(self, goal: Goal) -> tuple[float, float]:
        """Smaller is better: fewer samples to the target; of those without, the better value."""
        cost = math.inf if self.best is None else goal.sign * self.best
        return (math.inf if self.samples is None else self.samples), cost


def of_strategy(trainings: Sequence[Training]) -> dict[str, list[Training]]:
    """The trainings of each strategy."""
    names = dict.fromkeys(x.strategy for x in trainings)
    return {name: [x for x in trainings if x.strategy == name] for name in names}


def reachable(search: Sequence[Training], directory: Path, goal: Goal) -> float | None:
    """A target for all: the worst of what the best job of each strategy's search reached early."""
    found = []
    for jobs in of_strategy(search).values():
        each = [goal.costs(read_history(directory / x.folder)) for x in jobs]
        each = [[x for x in costs if math.isfinite(x)] for costs in each]
        early = [x for costs in each for x in costs[: math.ceil(EARLY * len(costs))]]
        found += [min(early)] if early else []
    rounding = Context(prec=4, rounding=ROUND_CEILING)  # to one that has been reached
    return goal.sign * float(rounding.create_decimal(repr(max(found)))) if found else None


# ---- over the seeds -----------------------------------------------------------------------------

Spread = dict[str, float | None]  # median, low, high; None: the target is not reached, or unknown


def interval(values: Any) -> tuple[Any, Any]:
    """Ends of the bootstrap interval of the median of the rows, at least two."""
    from scipy.stats import bootstrap

    options = {"confidence_level": CONFIDENCE, "rng": np.random.default_rng(0)}
    options |= {"method": "percentile", "n_resamples": RESAMPLES, "batch": 500}
    found = bootstrap((np.asarray(values),), np.median, axis=0, **options).confidence_interval
    return found.low, found.high


def spread(values: Sequence[float | None]) -> Spread:
    """Median and interval over runs; a run without a value is longer than all others."""
    filled = [_NEVER if x is None else x for x in values]
    ends = interval(filled) if len(filled) > 1 else (_NEVER, _NEVER)
    each = [float(np.median(filled)) if filled else _NEVER, *map(float, ends)]
    known = [x if x < _FINITE else None for x in each]
    return dict(zip(("median", "low", "high"), known, strict=True))


def times_as_much(values: Sequence[float | None], of: Sequence[float | None]) -> Spread:
    """Median and interval of the ratio of each run to the run with the same seed."""
    filled = [[_NEVER if x is None else x for x in each] for each in (values, of)]
    pairs = zip(*filled, strict=True)
    ratios = [1.0 if a == b else a / b if b else _NEVER for a, b in pairs]
    return spread([x if x * _FINITE > 1 else 0.0 for x in ratios])  # 0: the other one never did


def rows_of(runs: Mapping[str, Sequence[Training]]) -> list[dict[str, Any]]:
    """A row for each strategy, the fastest first; all have runs of the same seeds, or none.

    ``samples_times``: of the strategy that needs the fewest; ``samples_differ``: whether the
    interval leaves out 1 (None: unknown); the same for ``train_s``.
    """
    rows = [_row(name, each) for name, each in runs.items()]
    rows.sort(key=lambda row: [_order(row["train_s"]), -row["reached"], _order(row["samples"])])
    for what in COMPARED:
        first = min(rows, key=lambda row: _order(row[what]))
        theirs = [getattr(x, what) for x in runs[first["strategy"]]]
        for row in rows:
            mine = [getattr(x, what) for x in runs[row["strategy"]]]
            alone = not mine or row is first or first[what]["median"] is None
            ratio = None if alone else times_as_much(mine, theirs)
            differ = None
            if ratio is not None and len(mine) >= LEAST_SEEDS:
                low, high = ratio["low"], ratio["high"]
                differ = low is None or low > 1 or (high is not None and high < 1)
            row |= {f"{what}_times": ratio, f"{what}_differ": differ}
    return rows


def _row(name: str, runs: Sequence[Training]) -> dict[str, Any]:
    values = {what: [getattr(x, what) for x in runs] for what in (*AT, "best", "tested")}
    for what in ("best", "tested"):
        values[what] = [x for x in values[what] if x is not None and math.isfinite(x)]
    reached = sum(x.samples is not None for x in runs)
    spreads = {what: spread(each) for what, each in values.items()}
    return {"strategy": name, "seeds": len(runs), "reached": reached, **spreads}


def _order(found: Spread) -> float:
    return math.inf if found["median"] is None else found["median"]


# ---- in words -----------------------------------------------------------------------------------


def conclusions(rows: Sequence[Mapping[str, Any]], goal: Goal) -> Iterator[str]:
    """Sentences about the rows: the fastest strategy, and which differences may be chance."""
    if rows[0]["train_s"]["median"] is not None:
        yield f"{rows[0]['strategy']} has the shortest median time to {goal}"
        yield from (_verdict(row, rows[0]["strategy"]) for row in rows[1:])
        return
    best = [x for row in rows if (x := row["best"]["median"]) is not None]
    near = f"; the best median is {number(min(best, key=lambda x: goal.sign * x))}" if best else ""
    some = any(row["reached"] for row in rows)
    what = "no strategy reached it with more than half of its seeds" if some else "no run did"
    yield f"{goal} within the budget: {what}{near}. Give another target.value, or a larger budget"


def _verdict(row: Mapping[str, Any], first: str) -> str:
    name, times, differ = row["strategy"], row["train_s_times"], row["train_s_differ"]
    if not row["seeds"]:
        return f"{name}: no job of its search returned the metric"
    if times["median"] is None:
        return f"{name}: {row['reached']} of {row['seeds']} runs reach it"
    longer = f"{number(times['median'])} times as long as {first}"
    if differ is None:
        return f"{name} takes {longer}, perhaps by chance: it takes {LEAST_SEEDS} seeds to tell"
    if differ and times["median"] < 1:  # seed by seed, other than the medians
        return f"{name} takes {longer} seed by seed, though its median is longer: give more seeds"
    return f"{name} takes {longer}" if differ else f"{name}: within the noise ({longer})"


def numbers_of(texts: Iterable[str]) -> list[float]:
    """The searched values as numbers; none if they are words."""
    try:
        return [float(x) for x in texts]
    except ValueError:
        return []


def at_an_end(search: Sequence[Training], chosen: Mapping[str, str]) -> Iterator[str]:
    """The keys whose chosen value is the smallest or largest number that a search has tried."""
    for key, value in chosen.items():
        tried = numbers_of(x.values[key] for x in search)
        if len({*tried}) > 1 and float(value) in (min(tried), max(tried)):
            yield key
