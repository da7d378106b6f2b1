"""Never wait: a gradient is applied the moment it arrives.

DeepSpeech's *asynchronous* parallel optimisation. Nobody is ever held up, at the price of gradients
that were computed at parameters which have moved since (mozilla/DeepSpeech,
``doc/ParallelOptimization.rst``, "Asynchronous Parallel Optimization").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from hybridtrain.policies.policy import Needs
from hybridtrain.protocol.facts import Apply, Drop, Fact, Joined, Order, Pushed, Release
from hybridtrain.util.option_types import Checked, Natural


@dataclass
class OnArrival:
    """Apply and release each push on its own. There is nothing to remember but the answers."""

    _answers: dict[int, Sequence[Order]] = field(default_factory=dict, init=False, repr=False)

    def begin(self, n_workers: int) -> Needs:
        return Needs(whole_rounds=False, free=True)

    def on(self, fact: Fact) -> Sequence[Order]:
        match fact:
            case Pushed(worker):
                if worker not in self._answers:
                    self._answers[worker] = (Apply((worker,)), Release((worker,)))
                return self._answers[worker]
            case _:
                return ()


@dataclass
class NotTooLate(Checked):
    """As ``OnArrival``, but what was computed at parameters of too many updates ago does not count.

    Ringmaster ASGD: Maranjyan, Tyurin, Richtárik 2025 (arXiv:2501.16168), algorithm 1, whose delay
    threshold is ``max_staleness`` + 1.

    Args:
        max_staleness: updates since the worker has read the parameters; a contribution that is
            later is dropped, and its mini-batch is done again.
    """

    max_staleness: Natural = 0
    _updates: int = field(default=0, init=False, repr=False)
    _read: dict[int, int] = field(default_factory=dict, init=False, repr=False)  # at which update

    def begin(self, n_workers: int) -> Needs:
        self._updates, self._read = 0, {}
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
    """Nobody asks anybody: workers step the shared parameters themselves, without a lock.

    Steps are only counted here, so that all agree how many there were. Niu, Recht, Re, Wright,
    *Hogwild!*, NIPS 2011 (arXiv:1106.5730).
    """

    exchange: ClassVar[str] = "in_place"  # what workers hand over, unless it is chosen
