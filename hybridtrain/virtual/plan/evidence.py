"""Read recorded runs for a plan: times, the machine, the samples until a target.

Theory of operation. Each worker's first mini-batch is left out, because first steps take longer.
A worker is *slow* if its usual mini-batch takes 1.5 times as long as the median of the others'.
A mini-batch's processor time is the run's divided by its mini-batches; the rest of the computing
time is the device's, a sleep, or waiting for a core.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import numpy as np

from hybridtrain.engine.policies import Policy, make_policy
from hybridtrain.engine.recording.observed import MOST_EVENTS, Observed, observed_in
from hybridtrain.engine.recording.record_file import DROPPED, Record
from hybridtrain.engine.recording.record_reader import find_record, read_record
from hybridtrain.errors import UserError
from hybridtrain.report.history import HISTORY_FILE
from hybridtrain.report.runs import SUMMARY_FILE, Run, read_run
from hybridtrain.util.option_types import (
    EACH,
    Count,
    Range,
    has_target,
    hint,
    is_target,
    misfit,
    name_of,
)
from hybridtrain.util.own_parts import TARGET

_Seconds = Annotated[float, Range(0, 1e9)]
_Amount = Annotated[float, Range(0, 2**62)]
_SUMMARY = {  # a figure that the run does not know is null
    "samples?": Count | None,
    "effective_batch?": _Amount | None,
    "staleness?": {"mean?": _Amount | None},
    "cores?": Annotated[int, Range(0, 2**16)] | None,
    "cpu_s?": _Amount | None,
    "strategy?": str | None,
}
_SEEN = {  # the record
    "times": {EACH: [_Seconds]},
    "update_s": _Seconds,
    "batch_size": Annotated[int, Range(1, 10**9)],
}
LEAST = 30  # mini-batches of each worker
SLOW = 1.5  # times the median of the others
FULL = 0.9  # share of the cores from which on workers have waited for one
# Bytes of optimizer state for each parameter; of others Adam's are taken (docs/memory.md).
STATE_BYTES = {"SGD": 0, "Adagrad": 4, "ASGD": 4, "RMSprop": 4}
USUAL_STATE_BYTES = 8


@dataclass(frozen=True)
class MetricTarget:
    """A value of a validation metric that is to be reached."""

    metric: str
    value: float
    mode: str | None = None  # ``min`` or ``max``; None: as the run's task says, or its values go

    def __str__(self) -> str:
        return f"{self.metric}:{self.value:g}"


Reached = tuple[float, float]  # samples until the target, at least and at most


@dataclass(frozen=True)
class Evidence:
    """One recorded run.

    ``times``: worker -> seconds of its mini-batches; ``parameters``: that workers compute with, as
    in ``Requirements``; ``gathers``: contributions in an update; ``lag``: mini-batches computed at
    one point before one counts at a later one, (1 + staleness) times those of an update; ``cores``
    and ``cpu_s`` (processor seconds of a mini-batch): 0 if the run does not say; ``samples_per_s``:
    of training, without first steps.
    """

    folder: Path
    seen: Observed
    parameters: str
    times: Mapping[int, Sequence[float]]
    data: Mapping[str, Any]
    strategy: str
    gathers: float
    lag: float
    threads: int
    cores: int
    cpu_s: float
    state_bytes: int | None
    samples_per_s: float
    run: Run

    @cached_property
    def slow(self) -> dict[int, float]:
        """Slow workers, and how many times slower than the median of the others."""
        own = [median(self.times[worker]) for worker in range(self.seen.n_workers)]
        factors = {w: x / median(own[:w] + own[w + 1 :] or [x]) for w, x in enumerate(own)}
        return {worker: factor for worker, factor in factors.items() if factor >= SLOW}

    @cached_property
    def ordinary_s(self) -> float:
        """The mean of a mini-batch of theirs."""
        return fmean(fmean(own) for own in self.ordinary.values())

    @cached_property
    def ordinary(self) -> dict[int, Sequence[float]]:
        """Times of the workers that are not slow, numbered from 0."""
        kept = [self.times[w] for w in range(self.seen.n_workers) if w not in self.slow]
        return dict(enumerate(kept))

    def reached(self, target: MetricTarget) -> Reached | None:
        """Between which two validations the run reached the target; ``None``: it never did."""
        samples, values = self.run.curve.points("samples", target.metric)
        falls = self.falls(target)
        for number, value in enumerate(values):
            if value <= target.value if falls else value >= target.value:
                return samples[number - 1] if number else 0.0, samples[number]
        return None

    def falls(self, target: MetricTarget) -> bool | None:
        """Whether less is better: as it is said, as the task says, or as the values go to it.

        ``None``: it cannot be told, for example of one value.
        """
        if target.mode is not None:
            return target.mode == "min"
        if self.run.config.get("task.monitor") == target.metric:
            return bool(self.run.config.get("task.mode") == "min")
        _, values = self.run.curve.points("samples", target.metric)
        if len(values) < 2:
            return None
        goes = {x < values[0] for x in (values[-1], target.value) if x != values[0]}
        return goes.pop() if len(goes) == 1 else None


def evidence(folder: Path) -> Evidence:
    """Read a run.

    Raises:
        UserError: if it has no record, or one that is too short, or of several hosts.
    """
    record = read_record(find_record(folder), MOST_EVENTS)
    seen = observed_in(record)
    if seen.hosts > 1:
        raise UserError(
            f"run={folder} had {seen.hosts} hosts, and its workers' times have the network in "
            "them; give a run of one host, and say hosts=HxN"
        )
    fewest = min(seen.times, key=lambda worker: len(seen.times[worker]))
    if (n := len(seen.times[fewest])) < LEAST:
        raise UserError(
            f"run={folder}: its record has {n} contribution{'s' * (n != 1)} of worker {fewest}; a "
            f"plan needs {LEAST} of each worker: train longer (trainer.max_epochs)"
        )
    if record.foreign is not None and has_target(seen.strategy):
        raise UserError(record.foreign)
    run = read_run(folder)
    _check_figures(folder, seen, run)
    data = {k: v for k, v in record.told.items() if k.startswith("data ")}
    if model := record.header["about"].get("config", {}).get("model"):
        data["model"] = model.get("_target_")
    strategy = dict(seen.strategy)
    gathers, staleness = _gathers(run, strategy, seen)
    times = {worker: own[1:] for worker, own in seen.times.items()}
    return Evidence(
        folder=folder,
        seen=seen,
        parameters=record.header["requirements"]["parameters"],
        times=times,
        data=data,
        strategy=_named(run, strategy),
        gathers=gathers,
        lag=gathers * seen.steps * (1 + staleness),
        threads=int(record.header["threads"]),
        cores=int(run.figure("cores") or 0),
        cpu_s=(run.figure("cpu_s") or 0.0) * seen.batch_size / (run.figure("samples") or math.inf),
        state_bytes=_state_bytes(run),
        samples_per_s=speed_of(record),
        run=run,
    )


def _named(run: Run, strategy: Mapping[str, Any]) -> str:
    """The strategy's name; with a policy of the user's own, its class."""
    policy = strategy.get("policy") or "hybrid"
    if is_target(policy):
        return str(policy[TARGET])
    return str(run.summary.get("strategy") or name_of(policy))


def _check_figures(folder: Path, seen: Observed, run: Run) -> None:
    """Raises ``UserError`` for figures that no run can have."""
    wrong = misfit(run.summary, _SUMMARY, SUMMARY_FILE) or misfit(vars(seen), _SEEN, "record")
    idle = [worker for worker, own in seen.times.items() if not median(own[1:]) > 0]
    if wrong is None and idle:
        wrong = f"record: usual mini-batches of worker {idle[0]} took no time"
    if wrong is not None:
        raise UserError(f"run={folder}: {wrong}; correct the file, or give another run")


def _policy(strategy: Mapping[str, Any]) -> Policy:
    return make_policy(strategy.get("policy") or "hybrid")


def _gathers(run: Run, strategy: Mapping[str, Any], seen: Observed) -> tuple[float, float]:
    """Contributions in an update, and updates that one is late, on average."""
    effective, staleness = run.figure("effective_batch"), run.figure("staleness", "mean")
    if effective is not None:
        return max(1.0, effective / (seen.batch_size * seen.steps)), staleness or 0.0
    return float(_policy(strategy).begin(seen.n_workers).gathers), 0.0


def _state_bytes(run: Run) -> int | None:
    """Bytes of optimizer state for each parameter; ``None``: not known."""
    target = run.config.get("optimizer._target_")
    name = str(target).rpartition(".")[2]
    if target is None:
        return None
    more = ("amsgrad", "centered", *(("momentum",) if name in ("SGD", "RMSprop") else ()))
    n_bytes = STATE_BYTES.get(name, USUAL_STATE_BYTES) + 4 * sum(
        bool(run.config.get(f"optimizer.{option}")) for option in more
    )
    return n_bytes if run.config.get("strategy.state_dtype") is None else n_bytes // 2


def speed_of(record: Record) -> float:
    """Samples a second that count, from each worker's second mini-batch on, without pauses."""
    kinds = {name: number for number, name in enumerate(record.kinds)}
    cells = record.cells
    at_s = cells["at_s"] - _paused_s(cells, kinds)
    pushes, drops = cells["kind"] == kinds["Push"], cells["kind"] == kinds.get(DROPPED, -1)
    firsts = (np.flatnonzero(pushes & (cells["worker"] == w))[0] for w in range(record.n_workers))
    first = int(max(firsts))
    last = int(np.flatnonzero(pushes)[-1])
    size = float(np.median(cells["samples"][pushes & (cells["samples"] > 0)]))
    counted = cells["samples"][first + 1 : last + 1][pushes[first + 1 : last + 1]].sum()
    counted -= size * drops[first + 1 : last + 1].sum()
    return float(counted / (at_s[last] - at_s[first])) if at_s[last] > at_s[first] else math.nan


def _paused_s(cells: Any, kinds: Mapping[str, int]) -> Any:
    """For each cell, how long training has paused until then."""
    total, began, lasted = 0.0, None, np.zeros(len(cells))
    for number, (kind, at_s) in enumerate(zip(cells["kind"], cells["at_s"], strict=True)):
        if kind == kinds.get("Paused") and began is None:
            began = at_s
        elif kind == kinds.get("Resumed") and began is not None:
            total, began = total + at_s - began, None
        lasted[number] = total + (at_s - began if began is not None else 0.0)
    return lasted


def steady_samples_per_s(folder: Path) -> float:
    """:func:`speed_of` a run's whole record."""
    return speed_of(read_record(find_record(folder)))


def check_alike(runs: Sequence[Evidence]) -> None:
    """Raises ``UserError`` unless all runs trained the same model with the same data."""
    first = runs[0]
    for other in runs[1:]:
        what: list[tuple[str, Any, Any]] = [
            (name, first.data[name], other.data[name]) for name in first.data if name in other.data
        ]
        what.append(("bytes of parameters", first.seen.size_bytes, other.seen.size_bytes))
        what.append(("samples in a mini-batch", first.seen.batch_size, other.seen.batch_size))
        for name, one, two in what:
            if one != two:
                raise UserError(
                    f"run={first.folder} and {other.folder} differ in {name}: {one}, {two}; runs "
                    "in one plan train the same model with the same data and mini-batches"
                )


def directed(runs: Sequence[Evidence], target: MetricTarget) -> MetricTarget:
    """The target with its direction.

    Raises:
        UserError: if no run has logged the metric, some run's samples go back, or neither the runs
            nor the target say whether less is better.
    """
    _check_target(runs, target)
    falls = {each.falls(target) for each in runs} - {None}
    if len(falls) != 1:
        raise UserError(
            f"target={target} was given, and the runs do not say whether less of it is better "
            f"(their task.monitor is another metric); give target={target}:min, or {target}:max"
        )
    return replace(target, mode="min" if falls.pop() else "max")


def _check_target(runs: Sequence[Evidence], target: MetricTarget) -> None:
    curves = [each.run.curve for each in runs]
    known = sorted({m for x in curves for m in x.metrics if x.points("samples", m)[1]})
    if target.metric not in known:
        raise UserError(
            f"target={target} was given, but no run has logged {target.metric}"
            f"{hint(target.metric, known)}; logged were {', '.join(known) or 'no metrics'}"
        )
    for each in runs:
        samples = [0.0, *each.run.curve.points("samples", target.metric)[0]]
        for before, after in pairwise(samples):
            if after < before or after > 2**62:
                raise UserError(
                    f"run={each.folder}: {HISTORY_FILE} has {after:g} samples after {before:g}; "
                    "correct the file, or give another run"
                )


def nearest(runs: Sequence[Evidence], workers: int, strategy: str) -> Evidence:
    """The run whose number of workers is nearest; of several one of the strategy, or the first."""

    def far(run: Evidence) -> tuple[float, bool]:
        return abs(math.log(run.seen.n_workers / workers)), run.strategy != strategy

    return min(runs, key=far)


def best_of(runs: Sequence[Evidence], target: MetricTarget) -> float | None:
    """The value nearest to the target that any run has logged."""
    values = [x for each in runs for x in each.run.curve.points("samples", target.metric)[1]]
    return min(values, key=lambda x: abs(x - target.value), default=None)
