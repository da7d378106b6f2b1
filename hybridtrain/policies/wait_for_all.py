"""Synchronous SGD: DeepSpeech's *hybrid* parallel optimisation.

Every device reads the same parameters and computes the gradient of its own mini-batch; the host
waits for all, applies the mean once, and releases all. It equals one device with a mini-batch G
times larger, and a step takes as long as the slowest device (mozilla/DeepSpeech,
``doc/ParallelOptimization.rst``, "Hybrid Parallel Optimization").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridtrain.policies.policy import Needs
from hybridtrain.protocol.facts import Apply, Fact, Joined, Left, Order, Pushed, Release, Waiting


@dataclass
class WaitForAll:
    """A round ends when every active worker has pushed.

    Gradients are summed in the order of the workers' numbers, not of arrival, so that the sum has
    the same bits in every run.
    """

    def begin(self, n_workers: int) -> Needs:
        self._expected: set[int] = set()
        self._pushed: set[int] = set()
        return Needs(whole_rounds=True, gathers=n_workers, everyone=True)

    def on(self, fact: Fact) -> Sequence[Order]:
        match fact:
            case Joined(worker):
                self._expected.add(worker)
            case Pushed(worker):
                self._expected.add(worker)
                self._pushed.add(worker)
            case Waiting(worker) | Left(worker):
                self._expected.discard(worker)
                self._pushed.discard(worker)
        return self._end_of_round()

    def _end_of_round(self) -> Sequence[Order]:
        if not self._pushed or len(self._pushed) != len(self._expected):
            return ()
        workers = tuple(sorted(self._pushed))
        self._pushed.clear()
        return (Apply(workers), Release(workers))
