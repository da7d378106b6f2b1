"""Never wait: a gradient is applied the moment it arrives.

DeepSpeech's *asynchronous* parallel optimisation. Nobody is ever held up, at the price of gradients
that were computed at parameters which have moved since (mozilla/DeepSpeech,
``doc/ParallelOptimization.rst``, "Asynchronous Parallel Optimization").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hybridtrain.policies.policy import Requirements
from hybridtrain.protocol.facts import Apply, Fact, Order, Pushed, Release


@dataclass
class OnArrival:
    """Apply and release each push on its own. There is nothing to remember but the answers."""

    _answers: dict[int, Sequence[Order]] = field(default_factory=dict, init=False, repr=False)

    def begin(self, n_workers: int) -> Requirements:
        return Requirements(lockstep=False)

    def on(self, fact: Fact) -> Sequence[Order]:
        match fact:
            case Pushed(worker):
                if worker not in self._answers:
                    self._answers[worker] = (Apply((worker,)), Release((worker,)))
                return self._answers[worker]
            case _:
                return ()


@dataclass
class LockFree:
    """Nobody asks anybody: workers step the shared parameters themselves, without a lock.

    Each step is only counted, so that all agree how many there were. Where workers do not step
    (virtual time), gradients are applied on arrival. Niu, Recht, Re, Wright, *Hogwild!*, NIPS 2011
    (arXiv:1106.5730).
    """

    def begin(self, n_workers: int) -> Requirements:
        return Requirements(lockstep=False, lock_free=True)

    def on(self, fact: Fact) -> Sequence[Order]:
        match fact:
            case Pushed(worker):
                one = (worker,)
                return (Apply(one), Release(one))
            case _:
                return ()
