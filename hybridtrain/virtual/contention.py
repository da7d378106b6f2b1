"""Workers that compute at the same time take longer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple


class Contention(NamedTuple):
    """Factors on the times of mini-batches.

    ``longer``: of so many workers that begin at the same time; ``alone``: of one that waits for no
    other; ``slower``: workers on slower devices, which wait no more seconds than the others.
    """

    longer: Callable[[int], float]
    alone: float = 1.0
    slower: Mapping[int, float] = MappingProxyType({})

    def of(self, worker: int, longer: float) -> float:
        """The worker's factor, where ordinary workers have ``longer``."""
        if worker not in self.slower:
            return longer
        return self.alone + (longer - self.alone) / self.slower[worker]


NO_CONTENTION = Contention(lambda together: 1.0)
