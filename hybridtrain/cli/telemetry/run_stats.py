"""The numbers of a run, as the monitor keeps them for loggers, progress and summary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridtrain.lightning.run_context import strategy_of


@dataclass
class RunStats:
    """The numbers of a run so far. Lists have one entry for each worker; empty: nobody counts it.

    ``waiting_share``: 0 to 1; ``awaited_share``: of all waiting, that for this worker; ``step_s``:
    seconds of a mini-batch. ``staleness``: ``mean`` and ``max`` in updates, counted per
    contribution, and ``histogram``, staleness -> contributions. ``left_out``: contributions that a
    worker had to leave out, by the kind of fault. ``dropped``: contributions that came too late to
    count, or were of a step that was broken off. ``lead``: mini-batches that a worker is (``now``)
    or was at most (``max``) ahead of the slowest. ``effective_batch``: samples per update.
    ``handed_over``: by all workers, ``sent_bytes``, and ``saved_bytes`` by compression.
    ``device_memory``: by worker, ``needed_bytes`` at most (0: not measured) of its device's
    ``total_bytes``.
    """

    updates: int = 0
    samples: float = 0.0
    workers: int = 1
    train_s: float = 0.0
    samples_per_s: float = 0.0
    waiting_share: list[float] = field(default_factory=list)
    awaited_share: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    staleness: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, list[int]] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)
    lead: dict[str, list[int]] = field(default_factory=dict)
    effective_batch: float | None = None
    handed_over: dict[str, int] = field(default_factory=dict)
    device_memory: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ages: dict[Any, int] = self.staleness.get("histogram", {})  # of text, where it was JSON
        if ages:
            self.staleness |= {"histogram": {int(age): n for age, n in ages.items()}}
        self.samples_per_s = self.samples / self.train_s if self.train_s > 0 else 0.0

    @classmethod
    def of(cls, known: Mapping[str, Any], **others: Any) -> RunStats:
        """What a strategy's ``run_stats()`` says, and ``others`` where it says nothing."""
        names = cls.__dataclass_fields__
        return cls(**{k: v for k, v in {**others, **known}.items() if k in names})

    @property
    def waiting(self) -> float | None:
        """Mean over the workers, 0 to 1."""
        shares = self.waiting_share
        return sum(shares) / len(shares) if shares else None

    def in_history(self) -> dict[str, float]:
        """What of it belongs in a row of ``history.csv`` (:mod:`hybridtrain.report.history`)."""
        row = {
            **{name: getattr(self, name) for name in ("train_s", "updates", "samples")},
            "waiting_share": self.waiting,
            **{f"staleness_{k}": self.staleness.get(k) for k in ("mean", "max")},
            "effective_batch": self.effective_batch,
            "dropped": sum(self.dropped) if self.dropped else None,
            "lead_max": max(self.lead.get("max", ()), default=None),
        }
        return {name: value for name, value in row.items() if value is not None}


def up_to_date(stats: RunStats | None, trainer: Any) -> RunStats | None:
    """The numbers that the monitor has left, unless a disk has refused the last ones.

    Args:
        trainer: with the strategy that knows better, if one does.
    """
    known: Any = getattr(strategy_of(trainer), "run_stats", dict)()
    if not known.get("updates") or (stats is not None and stats.updates == known["updates"]):
        return stats
    return RunStats.of(known, workers=trainer.world_size, train_s=known["training_s"])
