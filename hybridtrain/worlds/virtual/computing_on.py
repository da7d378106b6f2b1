"""Who computes on, though what it has offered is not answered yet."""

from __future__ import annotations

from hybridtrain.protocol.messages import Begin, Gather, Push

LATER = 0  # the number of what a worker has said while it computes on; all others are from 1 on


class ComputingOn:
    """Of all workers of a virtual world: offers without an answer, answers that are on their way,
    and who cannot go on without one.
    """

    def __init__(self) -> None:
        self._unanswered: set[int] = set()
        self._there_s: dict[int, float] = {}  # when an answer that nobody has taken yet is there
        self._awaits: set[int] = set()

    def offers(self, worker: int, said: Push | Begin | Gather) -> bool:
        """Whether the worker computes on behind what it says now."""
        later = isinstance(said, Push) and said.later
        if later:
            self._unanswered.add(worker)
        return later

    def has_offered(self, worker: int) -> bool:
        """Whether what it has offered is still to be answered."""
        return worker in self._unanswered

    def answered(self, worker: int, at_s: float) -> bool:
        """The answer will be there at ``at_s``; whether the worker awaits it already."""
        self._unanswered.discard(worker)
        self._there_s[worker] = at_s
        awaited = worker in self._awaits
        self._awaits.discard(worker)
        return awaited

    def awaits(self, worker: int) -> bool:
        """The worker cannot go on without the answer; whether it has to wait for that."""
        if worker in self._unanswered:
            self._awaits.add(worker)
            return True
        return False

    def take_s(self, worker: int, now_s: float) -> float:
        """The worker takes the answer: when."""
        return max(now_s, self._there_s.pop(worker, now_s))

    def forget(self, worker: int) -> None:
        """The worker is gone."""
        self._unanswered.discard(worker)
        self._awaits.discard(worker)
        self._there_s.pop(worker, None)
