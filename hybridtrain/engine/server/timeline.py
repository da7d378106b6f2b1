"""The timeline of a run: what each worker does when, and when updates are made.

:class:`~hybridtrain.engine.server.run_statistics.RunStatistics` adds a bar for each interval that
it counts, so the lengths of bars sum to its figures. A record of a run is turned into one, too.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from enum import StrEnum

MOST_BARS = 16  # contributions of the fastest worker, at which a timeline ends


@dataclass
class TrainingTime:
    """Seconds of training, which stand still while it pauses (for a validation)."""

    began_s: float = 0.0  # later by the length of each pause
    _paused_at_s: float | None = None

    def of(self, at_s: float) -> float:
        """Seconds of training until ``at_s``."""
        return (at_s if self._paused_at_s is None else self._paused_at_s) - self.began_s

    def pause(self, now_s: float) -> None:
        """Training pauses; said twice, it is one pause."""
        if self._paused_at_s is None:
            self._paused_at_s = now_s

    def resume(self, now_s: float) -> None:
        """Training resumes."""
        if self._paused_at_s is not None:
            self.began_s += now_s - self._paused_at_s
            self._paused_at_s = None


class BarState(StrEnum):
    """A worker's state during a bar."""

    COMPUTING = "computing"
    WAITING = "waiting"
    DROPPED = "dropped"  # it has computed what did not count


@dataclass(slots=True)
class Bar:
    """An interval of a worker's time, in seconds since training began."""

    worker: int
    doing: BarState
    begin_s: float
    end_s: float


@dataclass
class Timeline:
    """Bars of ``n_workers`` workers from ``begin_s`` to ``until_s``, in seconds of training.

    ``updates``: the times of all until then; ``steps``: worker and end of each of its own steps, of
    which several make a contribution; ``complete``: whether all updates are known.
    """

    n_workers: int
    begin_s: float = 0.0
    bars: list[Bar] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)
    steps: list[tuple[int, float]] = field(default_factory=list)
    until_s: float = math.inf
    complete: bool = True
    _last: dict[int, Bar | None] = field(default_factory=dict)  # each worker's last computing bar
    _begun_s: dict[int, float] = field(default_factory=dict)  # of bars that have not ended
    _n_bars: dict[int, int] = field(default_factory=dict)

    def computed(self, worker: int, begin_s: float, end_s: float, pushed: bool = True) -> None:
        """The worker has computed; unless it has ``pushed``, the bar goes on."""
        begin_s = self._begun_s.pop(worker, begin_s)
        if not pushed:
            self._begun_s[worker] = begin_s
            return
        self._last[worker] = bar = self._add(Bar(worker, BarState.COMPUTING, begin_s, end_s))
        counts = bar is not None and begin_s >= self.begin_s
        self._n_bars[worker] = self._n_bars.get(worker, 0) + counts
        if self._n_bars[worker] == MOST_BARS:
            self.until_s = min(self.until_s, end_s)

    def waited(self, worker: int, begin_s: float, end_s: float) -> None:
        """The worker has waited, with or without having pushed."""
        if (begun_s := self._begun_s.pop(worker, None)) is not None:
            self._add(Bar(worker, BarState.COMPUTING, begun_s, begin_s))
        self._add(Bar(worker, BarState.WAITING, begin_s, end_s))

    def _add(self, bar: Bar) -> Bar | None:
        if bar.begin_s >= min(self.until_s, bar.end_s) or bar.end_s <= self.begin_s:
            return None
        self.bars.append(bar)
        return bar

    def dropped(self, worker: int) -> None:
        """The worker's last contribution does not count."""
        if (bar := self._last.get(worker)) is not None:
            bar.doing = BarState.DROPPED

    def interrupted(self, worker: int, at_s: float) -> None:
        """The worker begins anew, because what it computes would not count."""
        if worker in self._begun_s:
            self.computed(worker, at_s, at_s)
            self.dropped(worker)

    def updated(self, at_s: float) -> None:
        """An update has been made."""
        if at_s <= self.until_s:
            self.updates.append(at_s)

    def stepped(self, worker: int, at_s: float) -> None:
        """The worker has made a step of its own."""
        if at_s < self.until_s:
            self.steps.append((worker, at_s))

    def left(self, worker: int) -> None:
        """The worker is gone."""
        self._begun_s.pop(worker, None)

    @property
    def end_s(self) -> float:
        """The end of the picture, to which everything is known."""
        ends = [bar.end_s for bar in self.bars] + self.updates
        return min(self.until_s, max(ends, default=0.0))

    def seconds(self, worker: int, doing: BarState, until_s: float = math.inf) -> float:
        """How long the worker does this, until ``until_s``."""
        own = (bar for bar in self.bars if bar.worker == worker and bar.doing is doing)
        lengths = (min(bar.end_s, until_s) - max(bar.begin_s, self.begin_s) for bar in own)
        return sum(max(0.0, length) for length in lengths)

    def staleness(self, bar: Bar) -> int:
        """Updates that were made while the worker computed."""
        return bisect_left(self.updates, bar.end_s) - bisect_right(self.updates, bar.begin_s)
