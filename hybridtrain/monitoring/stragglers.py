"""Find a worker that is slower than the others, and what waiting for it costs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

_FACTOR = 1.5  # times the others' time per mini-batch
_COSTS = 0.1  # share of the others' time spent waiting
_AWAITED = 0.5  # share of all waiting that is for this worker
_LEAST_S = 5.0  # of training; before, the slowest worker is a matter of chance
_ENOUGH_S = 20.0  # of training before a report in mid-run


@dataclass(frozen=True, slots=True)
class Slow:
    """One worker, ``factor`` times slower than the median of the others.

    ``awaited_share``: share of all waiting that is for this worker; ``waiting_share``: share of the
    others' time spent waiting. Both in [0, 1].
    """

    worker: int
    factor: float
    awaited_share: float
    waiting_share: float

    def __str__(self) -> str:
        return (
            f"worker {self.worker} is slow: a mini-batch takes it {self.factor:.1f} times as long "
            f"as the others, who wait {100 * self.waiting_share:.0f} % of their time; "
            f"{100 * self.awaited_share:.0f} % of all waiting is for it"
        )


HINT = (
    "if it stays so: give it smaller mini-batches (strategy.batch_size_per_worker), or use a "
    "strategy that does not wait for the slowest (backup, async)"
)


def slow_worker(stats: Mapping[str, Any], training_s: float) -> Slow | None:
    """The worker that the others wait for, if that costs them enough to report.

    Args:
        stats: of :meth:`hybridtrain.server.run_statistics.RunStatistics.stats`; lists have one
            entry for each worker.
        training_s: training time so far.
    """
    seconds: Sequence[float] = stats.get("step_s", ())
    awaited, waiting = stats.get("awaited_share", ()), stats.get("waiting_share", ())
    if (
        training_s < _LEAST_S
        or len(seconds) < 2
        or min(seconds) <= 0.0
        or len(waiting) != len(seconds)
    ):
        return None
    worker = max(range(len(seconds)), key=seconds.__getitem__)
    others = [each for each in range(len(seconds)) if each != worker]
    factor = seconds[worker] / median(seconds[each] for each in others)
    costs = sum(waiting[each] for each in others) / len(others)
    if factor < _FACTOR or costs < _COSTS or awaited[worker] < _AWAITED:
        return None
    return Slow(worker, factor, awaited[worker], costs)


class SlowReport:
    """Reports a slow worker once in a run: in mid-run, or at its end.

    Args:
        stats: returns the run's statistics so far.
        say: prints a message to the user.
    """

    def __init__(self, stats: Callable[[], Mapping[str, Any]], say: Callable[[str], None]) -> None:
        self._stats, self._say = stats, say
        self._said = False

    def look(self, least_s: float = _ENOUGH_S) -> None:
        """Report a slow worker once ``least_s`` of training are over; called once a second."""
        if self._said or (stats := self._stats())["training_s"] < least_s:
            return
        if (slow := slow_worker(stats, stats["training_s"])) is not None:
            self._said = True
            self._say(f"{slow}; {HINT}")

    def conclude(self) -> None:
        """The run has ended."""
        self.look(0.0)
