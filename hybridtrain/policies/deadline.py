"""Backup workers without a number: contributions that take longer than usual are dropped.

Chen et al. 2016 (arXiv:1604.00981) fix how many of the workers are waited for. Here the workers'
own times say: a round ends when the median of past service times, and c times their median absolute
deviation, have passed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from hybridtrain.errors import UserError
from hybridtrain.policies.policy import Needs
from hybridtrain.protocol.facts import (
    Apply,
    Drop,
    Fact,
    Joined,
    Left,
    Order,
    Pushed,
    Release,
    SetTimer,
    TimerFired,
    Waiting,
)
from hybridtrain.util.option_types import Checked, NotNegative, Positive

_REMEMBERED = 200  # service times
_LEAST_SLACK = 0.1  # of the median, so that equal workers are never late by a hair


@dataclass
class Deadline(Checked):
    """Apply the mean of the contributions that come in time; the late are dropped.

    Args:
        c: median absolute deviations beyond the median. Past times are those of all workers.
        at_least: contributions that an update needs; ``None``: half of the workers.
    """

    c: NotNegative = 5.0
    at_least: Positive | None = None
    _n: int = field(default=1, init=False, repr=False)
    _fresh: set[int] = field(default_factory=set, init=False, repr=False)
    _active: set[int] = field(default_factory=set, init=False, repr=False)
    _got: set[int] = field(default_factory=set, init=False, repr=False)
    _began_s: float | None = field(default=None, init=False, repr=False)
    _end_s: float | None = field(default=None, init=False, repr=False)
    _released_s: dict[int, float] = field(default_factory=dict, init=False, repr=False)
    _times_s: deque[float] = field(default_factory=deque, init=False, repr=False)

    def begin(self, n_workers: int) -> Needs:
        if self.at_least is not None and self.at_least > n_workers:
            raise UserError(
                f"at_least={self.at_least} was given for {n_workers} "
                f"worker{'s' * (n_workers > 1)}; choose a number from 1 to {n_workers}"
            )
        self._n = max(n_workers // 2, 1) if self.at_least is None else self.at_least
        self._fresh, self._active, self._got = set(), set(), set()
        self._began_s, self._end_s, self._released_s = None, None, {}
        self._times_s = deque(maxlen=_REMEMBERED)
        usual = max(n_workers - 1, self._n)  # one is late, as if k were null
        return Needs(whole_rounds=n_workers == 1, drops_late=n_workers > 1, gathers=usual)

    def on(self, fact: Fact) -> Sequence[Order]:
        match fact:
            case Pushed(worker, at_s, last=last):
                return self._pushed(worker, at_s, last)
            case TimerFired(at_s):
                return self._close(at_s)
            case Joined(worker):
                self._join(worker)
            case Waiting(worker) | Left(worker):
                for known in (self._fresh, self._active, self._got):
                    known.discard(worker)
                return self._close(None)
        return ()

    def _join(self, worker: int) -> None:
        """Nobody knows since when it computes, so its next time does not count."""
        self._active.add(worker)
        self._fresh.add(worker)
        self._released_s.pop(worker, None)

    def _pushed(self, worker: int, at_s: float, last: bool) -> Sequence[Order]:
        if worker in self._released_s:
            self._times_s.append(at_s - self._released_s.pop(worker))
        if worker not in self._active:
            self._join(worker)
        if worker in self._fresh or last:
            self._fresh.add(worker)
            self._got.add(worker)
            return self._close(at_s)
        self._fresh.add(worker)
        self._released_s[worker] = at_s
        return (Drop((worker,)), Release((worker,)))

    def _close(self, at_s: float | None) -> Sequence[Order]:
        """End the round if all who count have come, or it is late."""
        if not self._got:
            return ()
        if len(self._got) < len(self._fresh):
            if at_s is None or len(self._got) < min(self._n, len(self._active)):
                return ()
            if self._end_s is None:  # once for each round: medians take time
                self._end_s = self._usual_end_s()
            if self._end_s is None:
                return ()
            if at_s < self._end_s:
                return (SetTimer(self._end_s),)
        workers = tuple(sorted(self._got))
        self._got, self._fresh, self._began_s, self._end_s = set(), set(workers), at_s, None
        if at_s is not None:
            self._released_s |= dict.fromkeys(workers, at_s)
        return (Apply(workers), Release(workers))

    def _usual_end_s(self) -> float | None:
        """When this round is to end; unknown at first, and after a pause."""
        if self._began_s is None or not self._times_s:
            return None
        usual = median(self._times_s)
        spread = median(abs(time - usual) for time in self._times_s)
        return self._began_s + usual + max(self.c * spread, _LEAST_SLACK * usual)
