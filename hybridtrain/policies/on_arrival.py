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
from hybridtrain.protocol.facts import Apply, Fact, Order, Pushed, Release


@dataclass
class OnArrival:
    """Apply and release each push on its own. There is nothing to remember but the answers."""

    _answers: dict[int, Sequence[Order]] = field(default_factory=dict, init=False, repr=False)

    def begin(self, n_workers: int) -> Needs:
        return Needs(whole_rounds=False)

    def on(self, fact: Fact) -> Sequence[Order]:
        match fact:
            case Pushed(worker):
                if worker not in self._answers:
                    self._answers[worker] = (Apply((worker,)), Release((worker,)))
                return self._answers[worker]
            case _:
                return ()


@dataclass
class LockFree(OnArrival):
    """Nobody asks anybody: workers step the shared parameters themselves, without a lock.

    Steps are only counted here, so that all agree how many there were. Niu, Recht, Re, Wright,
    *Hogwild!*, NIPS 2011 (arXiv:1106.5730).
    """

    exchange: ClassVar[str] = "in_place"  # what workers hand over, unless it is chosen
