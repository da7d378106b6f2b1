"""From which size of a mini-batch on the update costs nothing, as it is done meanwhile.

A device that computes on copies has three things to hide, per step: gradients leave over the bus
and are merged and stepped on the host while backward runs; parameters come back while the next
forward runs. Each is hidden where what runs beside it takes at least as long. What never is: the
last bucket's way out and the last portion's step, which can only begin when backward has ended.

Computing takes a fixed time and a time per sample: ``LinearFit``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import linear_regression


@dataclass(frozen=True, slots=True)
class LinearFit:
    """Seconds of a mini-batch: ``fixed_s`` + ``sample_s`` × samples."""

    fixed_s: float
    sample_s: float

    @classmethod
    def through(cls, measured: Sequence[tuple[float, float]]) -> LinearFit:
        """The line nearest to (samples, seconds) of two or more sizes, not falling."""
        sizes, times = zip(*measured, strict=True)
        slope, at_zero = linear_regression(sizes, times)
        return cls(max(at_zero, 0.0), max(slope, 0.0))

    def at(self, samples: float) -> float:
        """Seconds."""
        return self.fixed_s + self.sample_s * samples

    def reaches(self, seconds: float) -> float:
        """The least number of samples that take so long; infinity if none does."""
        if seconds <= self.fixed_s:
            return 0.0
        return (seconds - self.fixed_s) / self.sample_s if self.sample_s else math.inf


@dataclass(frozen=True, slots=True)
class Costs:
    """What one step has to hide, each in seconds as if it were alone, and beside what.

    ``out_s``: gradients to the host; ``update_s``: merged and stepped there; ``back_s``: parameters
    to the device. ``last_part``: what of the first two is left when backward ends.
    """

    out_s: float
    update_s: float
    back_s: float
    forward: LinearFit
    backward: LinearFit
    last_part: float = 1 / 12

    @property
    def tail_s(self) -> float:
        """What no size hides."""
        return self.last_part * (self.out_s + self.update_s)

    def step_s(self, samples: float) -> float:
        """Of a step of this size, everything overlapped."""
        meanwhile = max(self.backward.at(samples), self.out_s, self.update_s)
        return meanwhile + self.tail_s + max(self.forward.at(samples), self.back_s)

    def step_apart_s(self, samples: float) -> float:
        """Of a step in which only gradients leave meanwhile (``overlap_update=false``)."""
        meanwhile = max(self.backward.at(samples), self.out_s)
        return meanwhile + self.update_s + self.back_s + self.forward.at(samples)

    def exposed_s(self, samples: float) -> float:
        """What a step takes longer than forward and backward, everything overlapped."""
        return self.step_s(samples) - self.forward.at(samples) - self.backward.at(samples)


def crossover(costs: Costs) -> float:
    """Samples of the least mini-batch that hides all but the tail; infinity where none does."""
    leaving = costs.backward.reaches(max(costs.out_s, costs.update_s))
    return max(leaving, costs.forward.reaches(costs.back_s))
