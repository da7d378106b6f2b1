"""A policy, an exchange and a merge rule as users write them: plain classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridtrain.engine.exchanges import Offer, StepsOwnParameters
from hybridtrain.engine.policies import (
    Apply,
    Fact,
    Joined,
    Left,
    Needs,
    Order,
    Pushed,
    Release,
    Waiting,
)


class Quorum:
    """An update is the mean of the first ``least`` contributions."""

    def __init__(self, least: int = 2) -> None:
        if least < 1:
            raise ValueError(f"least={least} makes no update")
        self.least = least

    def begin(self, n_workers: int) -> Needs:
        self.active: set[int] = set()
        self.pushed: set[int] = set()
        return Needs(gathers=min(self.least, n_workers))

    def on(self, fact: Fact) -> Sequence[Order]:
        match fact:
            case Joined(worker):
                self.active.add(worker)
            case Pushed(worker):
                self.active.add(worker)
                self.pushed.add(worker)
            case Waiting(worker) | Left(worker):
                self.active.discard(worker)
                self.pushed.discard(worker)
        if not self.pushed or len(self.pushed) < min(self.least, len(self.active)):
            return []
        workers, self.pushed = tuple(sorted(self.pushed)), set()
        return [Apply(workers), Release(workers)]


class Every(StepsOwnParameters):
    """Each worker makes ``n`` steps of its own, then all go on from the mean."""

    remembers = ("since", "samples")

    def __init__(self, n: int = 2) -> None:
        self.n = n
        self._since, self._samples = 0, 0.0

    @property
    def has_unsent(self) -> bool:
        return self._since > 0

    def step(self, local: Any) -> Offer | None:
        local.step()
        self._samples += local.samples
        return self.skip(local)

    def skip(self, local: Any) -> Offer | None:
        self._since += 1
        return self.flush(local) if self._since == self.n else None

    def flush(self, local: Any) -> Offer | None:
        if not self._since:
            return None
        samples, self._since, self._samples = self._samples, 0, 0.0
        return Offer(local.moved(), samples)


class Largest:
    """The gradient of the worker with the most samples, plus ``more``."""

    least = 1

    def __init__(self, more: float = 0.0) -> None:
        self.more = more

    def merge(self, parts: Sequence[Any]) -> Sequence[Any]:
        return [x + self.more for x in max(parts, key=lambda part: part.weight).gradients]
