"""One worker at a time: DeepSpeech's *synchronous* parallel optimisation.

One device reads the parameters and computes, and the server applies its gradient before the next
device reads them; all others are idle: sequential SGD on alternating devices (mozilla/DeepSpeech,
``doc/ParallelOptimization.rst``, "Synchronous Parallel Optimization"). What the literature calls
synchronous is :class:`hybridtrain.policies.WaitForAll`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridtrain.policies.policy import Needs
from hybridtrain.protocol.facts import (
    Apply,
    Fact,
    Joined,
    Left,
    Order,
    Pushed,
    Ready,
    Release,
    Waiting,
)


@dataclass
class RoundRobin:
    """The turn passes in the order of the workers' numbers.

    A worker keeps its turn until it asks for the next mini-batch after a push, so that several
    pushes of one mini-batch (several optimizers), or several mini-batches for one push
    (accumulation) belong to one turn. An epoch begins with the first worker.
    """

    def begin(self, n_workers: int) -> Needs:
        self._n, self._holder, self._has_pushed = n_workers, 0, False
        self._active: set[int] = set()
        self._ready: set[int] = set()
        return Needs(whole_rounds=False, turns=True)

    def on(self, fact: Fact) -> Sequence[Order]:
        match fact:
            case Joined(worker):
                self._active.add(worker)
            case Ready(worker):
                self._active.add(worker)
                self._ready.add(worker)
                done = worker == self._holder and self._has_pushed
                if done or self._holder not in self._active:
                    self._pass_on()
                return self._grant()
            case Pushed(worker):
                self._active.add(worker)
                self._has_pushed = self._has_pushed or worker == self._holder
                return (Apply((worker,)), Release((worker,)))
            case Waiting(worker) | Left(worker):
                self._active.discard(worker)
                self._ready.discard(worker)
                if worker == self._holder or not self._active:
                    self._pass_on()
                return self._grant()
        return ()

    def _pass_on(self) -> None:
        """To the next active worker; without any, the next turn is the first worker's."""
        self._has_pushed = False
        after = range(self._holder + 1, self._holder + 1 + self._n)
        turns = (worker % self._n for worker in after)
        self._holder = next((w for w in turns if w in self._active), 0)

    def _grant(self) -> Sequence[Order]:
        if self._holder not in self._ready:
            return ()
        self._ready.discard(self._holder)
        return (Release((self._holder,)),)
