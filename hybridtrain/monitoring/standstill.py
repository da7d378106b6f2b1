"""Whether a run is deadlocked: every worker waits, and nothing can arrive. No processes here.

The last resort. The server refuses what it sees to be stuck
(:meth:`hybridtrain.server.server.Server._free_the_stuck`), and a worker that hangs is killed; while
it waits for an answer it cannot hang. What is left are errors of this package: two parts of it wait
for each other, a worker among them that is to come back. Such a run must end and say so.
"""

from __future__ import annotations

from dataclasses import dataclass

_LONG_S = 30.0  # nothing that could still happen takes so long
_TELLING_S = 600.0  # somebody says where training is: all but the weights of a model
_PAUSE_S = 2.0  # a longer one between looks is the watcher's own


@dataclass
class Standstill:
    """Looks at a run, about once a second."""

    for_s: float = 0.0  # how long it has stood still
    _heard: int = -1
    _last_s: float | None = None

    def look(self, now_s: float, stands: bool, heard: int, telling: bool = False) -> bool:
        """Whether it has stood still for too long.

        Args:
            now_s: by a monotonic clock.
            stands: everybody waits, and nothing is due.
            heard: messages of all workers so far.
            telling: somebody was asked where training is.
        """
        passed_s = 0.0 if self._last_s is None else min(now_s - self._last_s, _PAUSE_S)
        self._last_s = now_s
        if not stands or heard != self._heard:
            self.for_s, self._heard = 0.0, heard
            return False
        self.for_s += passed_s
        return self.for_s >= (_TELLING_S if telling else _LONG_S)
