"""Steps of each worker and of the slowest, in constant time per step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class StepCounts:
    """Counts steps of active workers; one that joins begins at the slowest's count."""

    least: int = 0
    _at: dict[int, int] = field(default_factory=dict)  # worker -> steps
    _workers: Counter[int] = field(default_factory=Counter)  # steps -> number of workers

    def lead(self, worker: int) -> int:
        """Steps ahead of the slowest; 0 for inactive workers."""
        return self._at.get(worker, self.least) - self.least

    def join(self, worker: int) -> None:
        """The worker is active."""
        if worker not in self._at:
            self._at[worker] = self.least
            self._workers[self.least] += 1

    def leave(self, worker: int) -> bool:
        """The worker is inactive; whether that raises the slowest's count."""
        steps = self._at.pop(worker, None)
        if steps is None:
            return False
        self._workers[steps] -= 1
        return self._moves_on()

    def tick(self, worker: int) -> bool:
        """The worker has made a step; whether that raises the slowest's count."""
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
