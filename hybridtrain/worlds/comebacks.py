"""Who comes back as another process: when, and from where in training."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field


@dataclass
class Comebacks:
    """Workers that are gone, and what has been heard for them.

    ``kept``: where training was some time ago, for when nobody is left to be asked.
    """

    kept: bytes = b""
    _due: dict[int, float] = field(default_factory=dict)  # when they may come back
    _told: dict[int, bytes] = field(default_factory=dict)  # where training is

    def expect(self, worker: int, at_s: float) -> None:
        """It may come back then."""
        self._due[worker] = at_s

    def __contains__(self, worker: int) -> bool:
        return worker in self._due

    def __bool__(self) -> bool:
        return bool(self._due)

    @property
    def next_s(self) -> float:
        """When one may come back."""
        return min(self._due.values(), default=math.inf)

    def called(self, now_s: float) -> Iterator[int]:
        """Those whose time has come, each once."""
        for worker, at_s in self._due.items():
            if now_s >= at_s:
                self._due[worker] = math.inf
                yield worker

    def hear(self, worker: int, told: bytes) -> None:
        """Where training is, for this one."""
        self._told[worker] = told

    def first(self, waiting: Collection[int]) -> int | None:
        """Who is to begin where all are gone: one who does not wait for an update."""
        called = [worker for worker, at_s in self._due.items() if at_s == math.inf]
        return next((w for w in called if w not in waiting and w not in self._told), None)

    def ready(self, gone: Collection[int]) -> Iterator[tuple[int, bytes]]:
        """Who can be started now, with what was told for it."""
        for worker in [worker for worker in self._told if worker in gone]:
            del self._due[worker]
            yield worker, self._told.pop(worker)

    def clear(self) -> None:
        """Nobody comes back."""
        self._due.clear()
        self._told.clear()
