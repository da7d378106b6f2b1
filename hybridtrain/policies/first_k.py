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

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass
class FirstK(Checked):
    """Apply the mean of the first k gradients.

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
