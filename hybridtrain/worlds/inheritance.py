"""Who writes the last checkpoint of a run that ends early.

Whoever stops says so and waits. The first worker that can is named, and says whether it has
written it; if it has not, or is lost on the way, the next one is named. When there is a checkpoint,
or nobody left, all may go.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hybridtrain.news import Heir
from hybridtrain.rounds import Replies
from hybridtrain.worlds.crew import WorkerProcess


@dataclass
class Inheritance:
    """As the parent knows it."""

    written: bool = False
    _waiting: set[int] = field(default_factory=set)
    _heir: int | None = None

    def stopped(self, worker: int) -> None:
        """It stands after its last whole step, and waits."""
        self._waiting.add(worker)

    def failed(self, worker: int, ending: bool) -> Replies:
        """It has raised, and waits; unless the run is ``ending`` there is nothing to write."""
        if ending:
            self.stopped(worker)
        return [] if ending else [(worker, Heir(False))]

    def saved(self, well: bool) -> None:
        """Somebody has written the checkpoint, or could not."""
        self.written = self.written or well
        self._heir = None

    def lost(self, worker: int) -> None:
        """Its process has ended."""
        self._waiting.discard(worker)
        if self._heir == worker:
            self._heir = None

    def decide(self, workers: Iterable[WorkerProcess], late: bool) -> Replies:
        """What those who wait are told.

        Args:
            workers: all; those who have not stopped yet may come.
            late: they are not waited for any longer.
        """
        if self.written:
            done, self._waiting = self._waiting, set()
            return [(worker, Heir(False)) for worker in sorted(done)]
        first = min(self._waiting, default=None)
        if first is None or self._heir is not None:
            return []
        before = (each for each in workers if each.number < first)
        if not late and any(not each.ended and not each.gone for each in before):
            return []
        self._heir = first
        self._waiting.discard(first)
        return [(first, Heir(True))]
