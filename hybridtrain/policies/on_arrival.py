"""Asynchronous SGD: each gradient is applied when it arrives.

DeepSpeech's *asynchronous* parallel optimisation: no worker waits, but gradients are stale
(mozilla/DeepSpeech, ``doc/ParallelOptimization.rst``, "Asynchronous Parallel Optimization").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hybridtrain.policies.policy import Needs
from hybridtrain.protocol.facts import Apply, Drop, Fact, Joined, Order, Pushed, Release
from hybridtrain.util.option_types import Checked, Natural


@dataclass
class OnArrival:
    """Apply and release each push on its own."""

    def begin(self, n_workers: int) -> Needs:
        self._orders = [(Apply((worker,)), Release((worker,))) for worker in range(n_workers)]
        return Needs(whole_rounds=False, free=True)

    def on(self, fact: Fact) -> Sequence[Order]:
        return self._orders[fact.worker] if isinstance(fact, Pushed) else ()


@dataclass
class NotTooLate(Checked):
    """As ``OnArrival``, but gradients that are too stale are dropped.

    Ringmaster ASGD: Maranjyan, Tyurin, Richtárik 2025 (arXiv:2501.16168), algorithm 1, whose delay
    threshold is ``max_staleness`` + 1.

    Args:
        max_staleness: updates since the worker read the parameters; a staler gradient is dropped,
            and its mini-batch is computed again.
    """

    max_staleness: Natural = 0

    def begin(self, n_workers: int) -> Needs:
        self._updates = 0
        self._read: dict[int, int] = {}  # worker -> updates when it read the parameters
        return Needs(whole_rounds=False, drops_late=n_workers > 1)

    def on(self, fact: Fact) -> Sequence[Order]:
        match fact:
            case Joined(worker):
                self._read[worker] = self._updates
            case Pushed(worker, last=last, empty=empty):
                late = self._updates - self._read.get(worker, self._updates)
                counts = last or late <= self.max_staleness
                self._updates += counts and not empty
                self._read[worker] = self._updates
                return (Apply((worker,)) if counts else Drop((worker,)), Release((worker,)))
        return ()


@dataclass
class LockFree(OnArrival):
    """Workers step the shared parameters themselves, without a lock; the server counts the steps.

    Niu, Recht, Re, Wright, *Hogwild!*, NIPS 2011 (arXiv:1106.5730).
    """

    exchange: ClassVar[str] = "in_place"  # what workers hand over, unless it is chosen
