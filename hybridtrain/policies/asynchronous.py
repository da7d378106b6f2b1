"""Never wait: a gradient is applied the moment it arrives.

DeepSpeech's *asynchronous* parallel optimisation. Nobody is ever held up, at the price of gradients
that were computed at parameters which have moved since (mozilla/DeepSpeech,
``doc/ParallelOptimization.rst``, "Asynchronous Parallel Optimization").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hybridtrain.events import Apply, Fact, Order, Pushed, Release


@dataclass
class OnArrival:
    """Apply and release each push on its own. There is nothing to remember."""

    lockstep: ClassVar[bool] = False

    def on(self, fact: Fact) -> list[Order]:
        match fact:
            case Pushed(worker):
                return [Apply((worker,)), Release((worker,))]
            case _:
                return []
