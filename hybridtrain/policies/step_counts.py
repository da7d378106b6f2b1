"""Who has made how many steps, and how many the slowest has: a constant amount of work per step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class StepCounts:
    """Counts steps of those who are there; who comes (again) begins with the slowest's count."""

    least: int = 0
    _at: dict[int, int] = field(default_factory=dict)  # worker -> steps
    _workers: Counter[int] = field(default_factory=Counter)  # steps -> how many have made them

    def lead(self, worker: int) -> int:
        """Steps ahead of the slowest; 0 for those who are not there."""
        return self._at.get(worker, self.least) - self.least

    def join(self, worker: int) -> None:
        """The worker is there."""
        if worker not in self._at:
            self._at[worker] = self.least
            self._workers[self.least] += 1

    def leave(self, worker: int) -> bool:
        """The worker is not there any more; whether the slowest is another one now."""
        steps = self._at.pop(worker, None)
        if steps is None:
            return False
        self._workers[steps] -= 1
        return self._moves_on()

    def tick(self, worker: int) -> bool:
        """The worker has made a step; whether everybody has made one more now."""
        if worker not in self._at:
            self.join(worker)
        steps = self._at[worker]
        self._at[worker] = steps + 1
        self._workers[steps] -= 1
        self._workers[steps + 1] += 1
        return steps == self.least and self._moves_on()

    def _moves_on(self) -> bool:
        before = self.least
        while self._at and self._workers[self.least] == 0:
            del self._workers[self.least]
            self.least += 1
        return self.least > before
