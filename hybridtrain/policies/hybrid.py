"""Wait for all: DeepSpeech's *hybrid* parallel optimisation.

Every device reads the same parameters and computes the gradient of its own mini-batch; the host
waits for all of them, applies the mean once, and lets everybody go on. It equals one device with a
mini-batch G times larger, and costs as much as the slowest device (mozilla/DeepSpeech,
``doc/ParallelOptimization.rst``, "Hybrid Parallel Optimization").
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from hybridtrain.events import Apply, Fact, Joined, Left, Order, Parked, Pushed, Release


@dataclass
class All:
    """One round at a time: it ends when every worker has pushed or is known not to push.

    Workers are applied in the order of their numbers, never in the order of arrival, so that sums
    of three and more floats come out the same in every run.
    """

    lockstep: ClassVar[bool] = True
    _expected: set[int] = field(default_factory=set)
    _pushed: set[int] = field(default_factory=set)

    def on(self, fact: Fact) -> list[Order]:
        match fact:
            case Joined(worker):
                self._expected.add(worker)
            case Pushed(worker):
                self._expected.add(worker)
                self._pushed.add(worker)
            case Parked(worker) | Left(worker):
                self._expected.discard(worker)
                self._pushed.discard(worker)
        return self._end_of_round()

    def _end_of_round(self) -> list[Order]:
        if not self._pushed or self._pushed != self._expected:
            return []
        workers = tuple(sorted(self._pushed))
        self._pushed.clear()
        return [Apply(workers), Release(workers)]
