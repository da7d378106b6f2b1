"""Service times of mini-batches in virtual seconds, drawn from a distribution.

Each worker has its own random numbers, so that one worker never changes another's times, and a run
is the same for its seed. Recorded times: :mod:`hybridtrain.worlds.virtual.measured_times`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from hybridtrain.errors import UserError
from hybridtrain.util.option_types import Above0, check

Draw = Callable[[], float]

# The parameter of each distribution beside its mean, with its default.
SHAPES: dict[str, tuple[str, float]] = {
    "constant": ("", 0.0),
    "exponential": ("", 0.0),
    "shifted_exponential": ("shift", 0.5),  # this share of the mean is always needed
    "pareto": ("alpha", 2.5),  # the tail's exponent; below 2 its variance is infinite
    "lognormal": ("sigma", 0.5),  # standard deviation of the logarithm
}


class Times(Protocol):
    """Service times of any number of workers."""

    def stream(self, worker: int, seed: int) -> Draw:
        """Draws the worker's service times in seconds, the same for a seed."""
        ...

    def expected_s(self, worker: int) -> float:
        """The mean of :meth:`stream`."""
        ...


@dataclass(frozen=True, slots=True)
class ServiceTimes:
    """A distribution of service times.

    Args:
        kind: one of ``SHAPES``.
        mean_s: expected seconds per mini-batch of an ordinary worker.
        shape: the distribution's own parameter; by default as in ``SHAPES``.
        slower: worker -> factor of its times.

    Raises:
        UserError: if there is no such distribution.
    """

    kind: str = "exponential"
    mean_s: float = 1.0
    shape: float | None = None
    slower: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in SHAPES:
            raise UserError(f"compute={self.kind!r} was given; known are {', '.join(SHAPES)}")
        check("compute.mean_s", self.mean_s, Above0)
        check_slower(self.slower)
        name, value = SHAPES[self.kind][0], self._shape()
        if name == "shift" and not 0 <= value <= 1:
            raise UserError(f"compute.shift={value} was given; it is a share of the mean, 0 to 1")
        if name == "alpha" and value <= 1:
            raise UserError(f"compute.alpha={value} was given; from 1 down there is no mean")
        if name == "sigma" and value < 0:
            raise UserError(f"compute.sigma={value} was given; it must not be negative")

    def stream(self, worker: int, seed: int) -> Draw:
        """Draws the worker's service times."""
        return self._scaled(Random(f"{seed}/{worker}"), self.expected_s(worker))

    def expected_s(self, worker: int) -> float:
        """The mean of :meth:`stream`."""
        return self.mean_s * self.slower.get(worker, 1.0)

    def _shape(self) -> float:
        return SHAPES[self.kind][1] if self.shape is None else self.shape

    def _scaled(self, random: Random, mean_s: float) -> Draw:
        """Draws with this mean; exponentials by inversion, in one call."""
        shape, uniform, log = self._shape(), random.random, math.log
        match self.kind:
            case "exponential":
                return lambda: -mean_s * log(1.0 - uniform())
            case "shifted_exponential":
                return lambda: mean_s * (shape - (1 - shape) * log(1.0 - uniform()))
            case "pareto":
                return lambda: mean_s * random.paretovariate(shape) * (shape - 1) / shape
            case "lognormal":
                return lambda: mean_s * math.exp(random.gauss(-shape * shape / 2, shape))
        return lambda: mean_s


def check_slower(slower: Mapping[int, float]) -> None:
    """Refuse impossible factors; raises UserError."""
    for worker, factor in slower.items():
        check(f"slower.{worker}", factor, Above0)
