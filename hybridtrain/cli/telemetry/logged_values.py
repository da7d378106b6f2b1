"""What of a run's numbers the loggers get: scalars for all, a histogram for those that take one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridtrain.cli.telemetry.run_stats import RunStats

MOST_BINS = 60  # of a histogram; staleness is wide where many workers run freely


def scalars(stats: RunStats) -> dict[str, float]:
    """One number for each name. What nobody has counted is left out."""
    staleness = stats.staleness
    found: dict[str, float] = {"samples_per_s": stats.samples_per_s}
    found |= {f"staleness/{k}": staleness[k] for k in ("mean", "max") if k in staleness}
    found |= {f"waiting/worker_{i}": x for i, x in enumerate(stats.waiting_share)}
    found |= {f"lead/worker_{i}": x for i, x in enumerate(stats.lead.get("now", []))}
    found |= {f"left_out/{fault}": sum(each) for fault, each in stats.left_out.items()}
    if stats.dropped:
        found["dropped"] = sum(stats.dropped)
    if stats.effective_batch is not None:
        found["effective_batch"] = stats.effective_batch
    return found


def log_histogram(logger: Any, name: str, ages: Mapping[int, int], step: int) -> None:
    """A histogram of whole numbers, exactly, where the logger's writer can take one.

    TensorBoard's writers can (``add_histogram_raw``); for any other logger nothing happens.

    Args:
        ages: how often each number came.
    """
    writer = getattr(logger, "experiment", None)
    add = getattr(writer, "add_histogram_raw", None)
    if add is None or not ages:
        return
    width = -(-(max(ages) + 1) // MOST_BINS)  # numbers in a bin
    counts = [0] * (max(ages) // width + 1)
    for age, count in ages.items():
        counts[age // width] += count
    add(
        name,
        min=float(min(ages)),
        max=float(max(ages)),
        num=sum(ages.values()),
        sum=float(sum(age * n for age, n in ages.items())),
        sum_squares=float(sum(age * age * n for age, n in ages.items())),
        bucket_limits=[(i + 1) * width - 0.5 for i in range(len(counts))],
        bucket_counts=counts,
        global_step=step,
    )
