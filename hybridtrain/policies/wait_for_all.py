"""Wait for all: DeepSpeech's *hybrid* parallel optimisation.

Every device reads the same parameters and computes the gradient of its own mini-batch; the host
waits for all of them, applies the mean once, and lets everybody go on. It equals one device with a
mini-batch G times larger, and costs as much as the slowest device (mozilla/DeepSpeech,
``doc/ParallelOptimization.rst``, "Hybrid Parallel Optimization").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hybridtrain.policies.policy import Needs
from hybridtrain.protocol.facts import Apply, Fact, Joined, Left, Order, Pushed, Release, Waiting


@dataclass
class WaitForAll:
    """One round at a time: it ends when every worker has pushed or is known not to push.

    Workers are applied in the order of their numbers, never in the order of arrival, so that sums
    of three and more floats come out the same in every run.
    """

    _expected: set[int] = field(default_factory=set, init=False, repr=False)
    _pushed: set[int] = field(default_factory=set, init=False, repr=False)

    def begin(self, n_workers: int) -> Needs:
        self._expected, self._pushed = set(), set()
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
