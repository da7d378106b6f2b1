"""Stale-synchronous: nobody may be more than ``lead`` mini-batches ahead of the slowest.

Ho et al. 2013 (NIPS, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server", section 2): a worker that has made c steps may go on if the slowest has made at least
c - s, and sees all updates that are older than that, and always its own.

Contributions are merged as late as nobody can tell: those of workers that must wait are applied,
together, at the moment somebody reads. Readers therefore see *all* that has been pushed, which is
more than is asked for; ``lead=0`` is exactly lock-step with the mean, and an unbounded lead exactly
the update on arrival.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hybridtrain.policies.policy import Needs
from hybridtrain.policies.step_counts import StepCounts
from hybridtrain.protocol.facts import Apply, Fact, Joined, Left, Order, Pushed, Release, Waiting
from hybridtrain.util.option_types import Checked, Natural


@dataclass
class BoundedStaleness(Checked):
    """Let workers go on while they are at most ``lead`` steps ahead of the slowest.

    Args:
        lead: s, from 0 on; ``None``: no bound.
    """

    lead: Natural | None = 3
    _clocks: StepCounts = field(default_factory=StepCounts, init=False, repr=False)
    _blocked: set[int] = field(default_factory=set, init=False, repr=False)
    _pending: set[int] = field(default_factory=set, init=False, repr=False)  # not yet applied

    def begin(self, n_workers: int) -> Needs:
        self._clocks, self._blocked, self._pending = StepCounts(), set(), set()
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
        # Only when the slowest has made a step may others than the one who pushes be freed.
        return self._free(self._blocked if moved else {worker})

    def _free(self, asked: Iterable[int]) -> Sequence[Order]:
        """Who may go on reads, so all that is pending counts now."""
        lead = self.lead
        freed = tuple(sorted(w for w in asked if lead is None or self._clocks.lead(w) <= lead))
        if not freed:
            return ()
        applied = tuple(sorted(self._pending))
        self._pending.clear()
        self._blocked.difference_update(freed)
        return (Apply(applied), Release(freed)) if applied else (Release(freed),)
