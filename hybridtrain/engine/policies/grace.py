"""Grace period: workers that push within one time window continue from the same parameters.

The scheduler of Liu et al., *Asynchronous Local-SGD Training for Language Modeling*, 2024
(arXiv:2401.09135): gradients of a window are applied one after the other, then their workers are
released together. A window of 0 is ``async``; with an endless one all wait for all, which is
``hybrid`` if a window makes one update (``together``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from hybridtrain.engine.policies.policy import Needs
from hybridtrain.engine.protocol.facts import (
    Apply,
    Fact,
    Joined,
    Left,
    Order,
    Pushed,
    Release,
    SetTimer,
    TimerFired,
    Waiting,
)
from hybridtrain.util.option_types import BriefRepr, Checked, Range


@dataclass(repr=False)
class Grace(Checked, BriefRepr):
    """Apply each gradient as an update; release all workers of a window together.

    Args:
        window_s: seconds after its first gradient; ``inf``: until all workers have pushed.
        together: a window makes one update, of the mean weighted by samples.
    """

    window_s: Annotated[float, Range(0, infinite=True)] = 0.5
    together: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.window_s = float(self.window_s)

    def begin(self, n_workers: int) -> Needs:
        self._active: set[int] = set()
        self._here: list[int] = []  # have pushed, in the order of arrival
        self._end_s = math.inf
        return Needs(whole_rounds=False)

    def on(self, fact: Fact) -> Sequence[Order]:
        match fact:
            case Joined(worker):
                self._active.add(worker)
            case Pushed(worker, at_s):
                self._active.add(worker)
                self._here.append(worker)
                return self._arrived(at_s)
            case Waiting(worker) | Left(worker):
                self._active.discard(worker)
                self._here = [each for each in self._here if each != worker]
                return self._close() if self._all_here() else ()
            case TimerFired(at_s) if self._here and at_s >= self._end_s:
                return self._close()
        return ()

    def _arrived(self, at_s: float) -> Sequence[Order]:
        if len(self._here) == 1:
            self._end_s = at_s + self.window_s
        if self._all_here() or at_s >= self._end_s:
            return self._close()
        return (SetTimer(self._end_s),) if self._end_s < math.inf else ()

    def _all_here(self) -> bool:
        return bool(self._here) and self._active <= set(self._here)

    def _close(self) -> Sequence[Order]:
        here, self._here = self._here, []
        updates = [tuple(sorted(here))] if self.together else [(worker,) for worker in here]
        return (*map(Apply, updates), Release(tuple(sorted(here))))
