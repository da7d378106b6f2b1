"""Update with the first k gradients: backup workers, k-sync, k-async and their batch variants.

Two questions span the family of Dutta et al. 2018 (arXiv:1803.01113, section 2), from fully
synchronous (k = W) to fully asynchronous (k = 1):

=================  ===========================  =====================================
 .                  a worker gives one           a worker may give several
=================  ===========================  =====================================
the late dropped   K-sync = *backup* workers    K-batch-sync
the late used      K-async                      K-batch-async; n-softsync with k = W/n
=================  ===========================  =====================================

Backup workers as in Chen et al. 2016 (arXiv:1604.00981): a gradient of older parameters than the
current ones is dropped on arrival, and its worker continues from the newest; at the end of an epoch
it counts, as no worker would repeat its mini-batch. n-softsync as in Zhang et al. 2016
(arXiv:1511.05950).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from hybridtrain.engine.policies.policy import Needs
from hybridtrain.engine.protocol.facts import (
    Accumulate,
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
from hybridtrain.errors import UserError
from hybridtrain.util.option_types import Checked, NotNegative, Positive


@dataclass
class FirstK(Checked):
    """Apply the mean of the first k gradients.

    A worker that brings nothing (it only fetches, or abstains) is none of the k, and goes on. The
    others wait for k gradients, or until it has ended its data.

    Args:
        k: gradients per update; ``None``: all workers but one. Fewer when fewer workers are active
            (the others have reached the end of their data).
        late: drop or use a gradient of parameters before the last update.
        several: release workers at once, so that one may push several of the k gradients; else a
            worker waits for the update with its gradient.
    """

    k: Positive | None = None
    late: Literal["drop", "use"] = "drop"
    several: bool = False

    def begin(self, n_workers: int) -> Needs:
        if self.k is not None and self.k > n_workers and not self.several:
            raise UserError(
                f"k={self.k} was given for {n_workers} worker{'s' * (n_workers > 1)}, who would "
                f"never make so many contributions; choose k from 1 to {n_workers}"
            )
        self._n = max(n_workers - 1, 1) if self.k is None else self.k
        self._round = self._held = 0
        self._since: dict[int, int] = {}  # active worker -> round in which it began
        self._got: set[int] = set()  # wait for the update
        self._in_rounds = self._n == n_workers and not self.several  # all step equally often
        drops = self.late == "drop"
        if self.several:
            return Needs(False, holds=self._n > 1, drops_late=drops, gathers=self._n)
        drops &= not self._in_rounds
        return Needs(self._in_rounds, drops_late=drops, gathers=self._n)

    def on(self, fact: Fact) -> Sequence[Order]:
        match fact:
            case Pushed(worker, empty=True) if not self._in_rounds:
                self._since[worker] = self._round
                goes_on = Accumulate if self._held else Apply  # which adds nothing
                return (goes_on((worker,)), Release((worker,)))
            case Pushed(worker, last=last):
                return self._pushed(worker, last)
            case Joined(worker, behind):
                self._since[worker] = self._round - behind
            case Waiting(worker) | Left(worker):
                self._since.pop(worker, None)
                self._got.discard(worker)
                return self._close()
        return ()

    def _pushed(self, worker: int, last: bool) -> Sequence[Order]:
        since = self._since.setdefault(worker, self._round)
        if self.late == "drop" and since < self._round:
            self._since[worker] = self._round
            if not last:  # else it counts as one of this round
                return (Drop((worker,)), Release((worker,)))
        if self.several and self._held + 1 < self._n:
            self._held += 1
            return (Accumulate((worker,)), Release((worker,)))
        self._got.add(worker)
        return self._close()

    def _close(self) -> Sequence[Order]:
        """Update if k gradients are here, or no active worker can push more."""
        if not self._got and not (self._held and not self._since):
            return ()
        if not self.several and len(self._got) < min(self._n, len(self._since)):
            return ()
        workers = tuple(sorted(self._got))
        self._got.clear()
        self._held = 0
        self._round += 1
        for worker in workers:
            self._since[worker] = self._round
        return (Apply(workers), Release(workers))


@dataclass
class Softsync(Checked):
    """n-softsync: workers are released at once, and every W/n gradients make an update.

    Gradients are about n updates old (Zhang et al. 2016, arXiv:1511.05950, section 3; there the
    learning rate is divided by the staleness).

    Args:
        n: 1: an update has W gradients; W: it has one.
    """

    n: Positive = 1

    def begin(self, n_workers: int) -> Needs:
        if self.n > n_workers:
            raise UserError(
                f"n={self.n} was given for {n_workers} worker{'s' * (n_workers > 1)}; an update is "
                f"made of W/n contributions, so choose n from 1 to {n_workers}"
            )
        self._rule = FirstK(n_workers // self.n, late="use", several=True)
        return self._rule.begin(n_workers)

    def on(self, fact: Fact) -> Sequence[Order]:
        return self._rule.on(fact)


# ---- backup workers with a deadline: gradients that take longer than usual are dropped ----------
# Chen et al. 2016 (arXiv:1604.00981) wait for a fixed number of workers. Here a round ends after
# the median of past service times plus c times their median absolute deviation.

_REMEMBERED = 200  # service times
_LEAST_SLACK = 0.1  # of the median, so that equally fast workers are never late


@dataclass
class Deadline(Checked):
    """Apply the mean of the gradients that arrive in time; drop the late ones.

    Args:
        c: median absolute deviations beyond the median, over the past times of all workers.
        at_least: gradients per update at least; ``None``: half of the workers.
    """

    c: NotNegative = 5.0
    at_least: Positive | None = None

    def begin(self, n_workers: int) -> Needs:
        if self.at_least is not None and self.at_least > n_workers:
            raise UserError(
                f"at_least={self.at_least} was given for {n_workers} "
                f"worker{'s' * (n_workers > 1)}; choose a number from 1 to {n_workers}"
            )
        self._n = max(n_workers // 2, 1) if self.at_least is None else self.at_least
        self._fresh: set[int] = set()  # compute at the current parameters
        self._active: set[int] = set()
        self._got: set[int] = set()  # have pushed in this round
        self._began_s: float | None = None
        self._end_s: float | None = None
        self._released_s: dict[int, float] = {}
        self._times_s: deque[float] = deque(maxlen=_REMEMBERED)
        usual = max(n_workers - 1, self._n)  # one is late, as with k=null
        return Needs(whole_rounds=n_workers == 1, drops_late=n_workers > 1, gathers=usual)

    def on(self, fact: Fact) -> Sequence[Order]:
        match fact:
            case Pushed(worker, at_s, last=last):
                return self._pushed(worker, at_s, last)
            case TimerFired(at_s):
                return self._close(at_s)
            case Joined(worker, behind):
                self._join(worker)
                if behind:
                    self._fresh.discard(worker)
            case Waiting(worker) | Left(worker):
                for known in (self._fresh, self._active, self._got):
                    known.discard(worker)
                return self._close(None)
        return ()

    def _join(self, worker: int) -> None:
        """Its start is unknown, so its next service time is not recorded."""
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
        """End the round if all fresh gradients have arrived or the deadline has passed."""
        if not self._got:
            return ()
        if len(self._got) < len(self._fresh):
            if at_s is None or len(self._got) < self._n:
                return ()
            if self._end_s is None:  # once per round: medians take time
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
        """The deadline of this round; unknown in the first round and after a pause."""
        if self._began_s is None or not self._times_s:
            return None
        usual = median(self._times_s)
        spread = median(abs(time - usual) for time in self._times_s)
        return self._began_s + usual + max(self.c * spread, _LEAST_SLACK * usual)
