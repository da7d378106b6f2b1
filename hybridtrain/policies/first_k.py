"""Wait for the first k: backup workers, and their kin that keep what comes late.

An update is made of the first k contributions. Two questions span the family of Dutta et al. 2018
(arXiv:1803.01113, section 2), which has lock-step (k = W) and arrival (k = 1) at its ends:

=================  ===========================  =====================================
 .                  a worker gives one           a worker may give several
=================  ===========================  =====================================
the late dropped   K-sync = *backup* workers    K-batch-sync
the late used      K-async                      K-batch-async; n-softsync with k = W/n
=================  ===========================  =====================================

Backup workers are those of Chen et al. 2016 (arXiv:1604.00981): a contribution computed from
parameters older than the current ones is dropped when it arrives, and its worker goes on from the
newest; at the end of an epoch it counts, when nobody would do its mini-batch again. n-softsync is
that of Zhang et al. 2016 (arXiv:1511.05950).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from hybridtrain.errors import UserError
from hybridtrain.policies.policy import Needs
from hybridtrain.protocol.facts import (
    Accumulate,
    Apply,
    Drop,
    Fact,
    Joined,
    Left,
    Order,
    Pushed,
    Release,
    Waiting,
)
from hybridtrain.util.option_types import Checked, Positive

Late = Literal["drop", "use"]


@dataclass
class FirstK(Checked):
    """Apply the mean of the first k contributions.

    Args:
        k: how many make an update; ``None``: all but one worker. Fewer where fewer workers are
            there (the others have come to the end of their data).
        late: what becomes of a contribution that was computed before the last update.
        several: a worker goes on at once, and may give several of the k; else it waits for the
            update that it is part of.
    """

    k: Positive | None = None
    late: Late = "drop"
    several: bool = False
    _n: int = field(default=0, init=False, repr=False)
    _round: int = field(default=0, init=False, repr=False)
    _since: dict[int, int] = field(default_factory=dict, init=False, repr=False)  # active workers
    _got: set[int] = field(default_factory=set, init=False, repr=False)  # who waits for the update
    _held: int = field(default=0, init=False, repr=False)

    def begin(self, n_workers: int) -> Needs:
        if self.k is not None and self.k > n_workers and not self.several:
            raise UserError(
                f"k={self.k} was given for {n_workers} worker{'s' * (n_workers > 1)}, who would "
                f"never make so many contributions; choose k from 1 to {n_workers}"
            )
        self._n = max(n_workers - 1, 1) if self.k is None else self.k
        self._round, self._since, self._got, self._held = 0, {}, set(), 0
        drops = self.late == "drop"
        if self.several:
            return Needs(False, holds=self._n > 1, drops_late=drops, gathers=self._n)
        whole_rounds = self._n == n_workers
        return Needs(whole_rounds, drops_late=drops and not whole_rounds, gathers=self._n)

    def on(self, fact: Fact) -> Sequence[Order]:
        match fact:
            case Pushed(worker, last=last):
                return self._pushed(worker, last)
            case Joined(worker):
                self._since[worker] = self._round
            case Waiting(worker) | Left(worker):
                self._since.pop(worker, None)
                self._got.discard(worker)
                return self._close()
        return ()

    def _pushed(self, worker: int, last: bool) -> Sequence[Order]:
        since = self._since.setdefault(worker, self._round)
        if self.late == "drop" and since < self._round:
            self._since[worker] = self._round
            if not last:  # else it counts as if it had begun in this round
                return (Drop((worker,)), Release((worker,)))
        if self.several and self._held + 1 < self._n:
            self._held += 1
            return (Accumulate((worker,)), Release((worker,)))
        self._got.add(worker)
        return self._close()

    def _close(self) -> Sequence[Order]:
        """End the round if there is enough for an update, or nobody is left to bring more."""
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
    """n-softsync: W workers go on at once, and every W/n contributions make an update.

    So contributions are about n updates old (Zhang et al. 2016, arXiv:1511.05950, section 3, who
    divide the learning rate by the staleness).

    Args:
        n: 1: as many contributions as workers; W: each on its own.
    """

    n: Positive = 1
    _rule: FirstK = field(default_factory=FirstK, init=False, repr=False)

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
