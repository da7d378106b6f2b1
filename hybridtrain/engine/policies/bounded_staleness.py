"""Stale-synchronous parallel: no worker gets more than ``lead`` steps ahead of the slowest.

Ho et al. 2013 (NIPS, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server", section 2): a worker with c steps continues if the slowest has at least c - s; it sees all
updates older than that, and its own.

Gradients of blocked workers stay pending until the next worker is released, and are then applied as
one update. A released worker therefore sees *all* gradients pushed so far, more than the paper asks
for; ``lead=0`` equals ``hybrid``, and an unbounded lead equals ``async``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hybridtrain.engine.policies.policy import Needs
from hybridtrain.engine.protocol.facts import (
    Apply,
    Fact,
    Joined,
    Left,
    Order,
    Pushed,
    Release,
    Waiting,
)
from hybridtrain.util.option_types import Checked, Natural

# ---- steps of each worker and of the slowest, in constant time per step -------------------------


@dataclass
class StepCounts:
    """Counts steps of active workers; one that joins begins at the slowest's count."""

    least: int = 0
    _at: dict[int, int] = field(default_factory=dict)  # worker -> steps
    _workers: Counter[int] = field(default_factory=Counter)  # steps -> number of workers

    def lead(self, worker: int) -> int:
        """Steps ahead of the slowest; 0 for inactive workers."""
        return self._at.get(worker, self.least) - self.least

    def join(self, worker: int) -> None:
        """The worker is active."""
        if worker not in self._at:
            self._at[worker] = self.least
            self._workers[self.least] += 1

    def leave(self, worker: int) -> bool:
        """The worker is inactive; whether that raises the slowest's count."""
        steps = self._at.pop(worker, None)
        if steps is None:
            return False
        self._workers[steps] -= 1
        return self._moves_on()

    def tick(self, worker: int) -> bool:
        """The worker has made a step; whether that raises the slowest's count."""
        self.join(worker)
        steps = self._at[worker]
        self._at[worker] = steps + 1
        self._workers[steps] -= 1
        self._workers[steps + 1] += 1
        return steps == self.least and self._moves_on()

    def _moves_on(self) -> bool:
        before = self.least
        while self._at and self._workers[self.least] == 0:
            del self._workers[self.least]
            self.least += 1
        return self.least > before


@dataclass
class BoundedStaleness(Checked):
    """Release workers that are at most ``lead`` steps ahead of the slowest.

    Args:
        lead: s, from 0 on; ``None``: no bound.
    """

    lead: Natural | None = 3

    def begin(self, n_workers: int) -> Needs:
        self._clocks = StepCounts()
        self._blocked: set[int] = set()
        self._pending: set[int] = set()  # pushed, not yet applied
        gathers = n_workers if self.lead == 0 else 1
        return Needs(whole_rounds=self.lead == 0, gathers=gathers)

    def on(self, fact: Fact) -> Sequence[Order]:
        match fact:
            case Joined(worker):
                self._clocks.join(worker)
            case Pushed(worker):
                return self._pushed(worker)
            case Waiting(worker) | Left(worker):
                self._blocked.discard(worker)
                self._pending.discard(worker)
                return self._free(self._blocked) if self._clocks.leave(worker) else ()
        return ()

    def _pushed(self, worker: int) -> Sequence[Order]:
        moved = self._clocks.tick(worker)
        self._blocked.add(worker)
        self._pending.add(worker)
        # Other workers can only be released when the slowest has made a step.
        return self._free(self._blocked if moved else {worker})

    def _free(self, asked: Iterable[int]) -> Sequence[Order]:
        """Release those within the bound; before they read, apply all pending gradients."""
        lead = self.lead
        freed = tuple(sorted(w for w in asked if lead is None or self._clocks.lead(w) <= lead))
        if not freed:
            return ()
        applied = tuple(sorted(self._pending))
        self._pending.clear()
        self._blocked.difference_update(freed)
        return (Apply(applied), Release(freed)) if applied else (Release(freed),)
