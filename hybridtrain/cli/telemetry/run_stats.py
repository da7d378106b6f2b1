"""The numbers of a run, as the monitor keeps them for loggers, progress and summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict


class Staleness(TypedDict, total=False):
    """In updates, counted per contribution; empty where nobody counts it."""

    mean: float
    max: float
    histogram: dict[int, int]  # staleness -> contributions


class RunStats(TypedDict):
    """The numbers of a run so far. Lists have one entry for each worker; empty: nobody counts it.

    ``waiting_share``: 0 to 1; ``awaited_share``: of all waiting, that for this worker; ``step_s``:
    seconds of a mini-batch. ``left_out``: contributions that a worker had to leave out, by the
    kind of fault. ``dropped``: contributions that came too late to count, or were of a step that
    was broken off. ``lead``: mini-batches that a worker is (``now``) or was at most (``max``) ahead
    of the slowest. ``effective_batch``: samples per update.
    """

    updates: int
    samples: float
    samples_per_s: float
    waiting_share: list[float]
    awaited_share: list[float]
    step_s: list[float]
    staleness: Staleness
    left_out: dict[str, list[int]]
    dropped: list[int]
    lead: dict[str, list[int]]
    effective_batch: float | None
    workers: int
    train_s: float


def counted(updates: int, samples: float, workers: int, train_s: float) -> RunStats:
    """What can be said of any strategy."""
    return RunStats(
        updates=updates,
        samples=samples,
        samples_per_s=0.0,
        waiting_share=[],
        awaited_share=[],
        step_s=[],
        staleness={},
        left_out={},
        dropped=[],
        lead={},
        effective_batch=None,
        workers=workers,
        train_s=train_s,
    )


def with_known(stats: RunStats, known: Mapping[str, Any]) -> RunStats:
    """With what a strategy knows better (its ``run_stats()``); further keys are no concern here."""
    stats.update({k: v for k, v in known.items() if k in stats})  # type: ignore[typeddict-item]
    ages = stats["staleness"].get("histogram", {})
    stats["staleness"] |= {"histogram": {int(age): n for age, n in ages.items()}} if ages else {}
    return stats


def up_to_date(stats: RunStats | None, trainer: Any) -> RunStats | None:
    """The numbers that the monitor has left, unless a disk has refused the last ones.

    Args:
        trainer: with the strategy that knows better, if one does.
    """
    known: Any = getattr(trainer.strategy, "run_stats", dict)()
    if not known.get("updates") or (stats is not None and stats["updates"] == known["updates"]):
        return stats
    train_s = known["training_s"]
    stats = with_known(counted(0, 0.0, trainer.world_size, train_s), known)
    stats["samples_per_s"] = stats["samples"] / train_s if train_s > 0 else 0.0
    return stats


def history_row(stats: RunStats) -> dict[str, float]:
    """What of it belongs in a row of ``history.csv`` (:mod:`hybridtrain.report.history`)."""
    row: dict[str, float] = {name: stats[name] for name in ("train_s", "updates", "samples")}
    if stats["waiting_share"]:
        row["waiting_share"] = sum(stats["waiting_share"]) / len(stats["waiting_share"])
    staleness = stats["staleness"]
    row |= {f"staleness_{k}": staleness[k] for k in ("mean", "max") if k in staleness}
    if stats["effective_batch"] is not None:
        row["effective_batch"] = stats["effective_batch"]
    if stats["dropped"]:
        row["dropped"] = sum(stats["dropped"])
    if stats["lead"].get("max"):
        row["lead_max"] = max(stats["lead"]["max"])
    return row
