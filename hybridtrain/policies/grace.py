"""Workers that push within one window of time go on from the same parameters.

Liu et al., *Asynchronous Local-SGD Training for Language Modeling*, 2024 (arXiv:2401.09135), whose
scheduler waits for a grace period: contributions of that time are applied one behind the other, and
then all who are there go on at once. Without a window that is ``async``; with an endless one all
wait for one another. If contributions of a window make one update ``together``, that is ``hybrid``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from hybridtrain.policies.policy import Needs
from hybridtrain.protocol.facts import (
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
from hybridtrain.util.named_choice import BriefRepr
from hybridtrain.util.option_types import Checked, Range


@dataclass(repr=False)
class Grace(Checked, BriefRepr):
    """Apply each contribution by itself; release all workers of a window together.

    Args:
        window_s: seconds behind the first of them; ``inf``: until all have come.
        together: contributions of one window make one update, with their mean weighted by samples.
    """

    window_s: Annotated[float, Range(0, infinite=True)] = 0.5
    together: bool = False
    _active: set[int] = field(default_factory=set, init=False, repr=False)
    _here: list[int] = field(default_factory=list, init=False, repr=False)  # as they have come
    _end_s: float = field(default=math.inf, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.window_s = float(self.window_s)

    def begin(self, n_workers: int) -> Needs:
        self._active, self._here, self._end_s = set(), [], math.inf
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
        here, self._here, self._end_s = self._here, [], math.inf
        updates = [tuple(sorted(here))] if self.together else [(worker,) for worker in here]
        return (*map(Apply, updates), Release(tuple(sorted(here))))
