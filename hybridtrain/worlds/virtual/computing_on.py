"""Who computes on, though what it has offered is not answered yet."""

from __future__ import annotations

from hybridtrain.protocol.messages import Begin, Gather, Push


class ComputingOn:
    """Of all workers of a virtual world: offers without an answer, answers that are on their way,
    and who cannot go on without one.
    """

    def __init__(self) -> None:
        self._offers = 0  # so far
        self._unanswered: dict[int, int] = {}  # the number of each
        self._there_s: dict[int, float] = {}  # when an answer that nobody has taken yet is there
        self._awaits: set[int] = set()

    def offers(self, worker: int, said: Push | Begin | Gather) -> bool:
        """Whether the worker computes on behind what it says now."""
        later = isinstance(said, Push) and said.later
        if later:
            self._offers += 1
            self._unanswered[worker] = -self._offers
        return later

    def number(self, worker: int) -> int | None:
        """Of what it has offered, below 0, as long as that is not answered."""
        return self._unanswered.get(worker)

    def answered(self, worker: int, at_s: float) -> bool:
        """The answer will be there at ``at_s``; whether the worker awaits it already."""
        self._unanswered.pop(worker)
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
        self._unanswered.pop(worker, None)
        self._awaits.discard(worker)
        self._there_s.pop(worker, None)
