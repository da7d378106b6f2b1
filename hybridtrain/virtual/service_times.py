"""Service times of mini-batches in virtual seconds, drawn from a distribution.

Each worker has its own random numbers, so that one worker never changes another's times, and a run
is the same for its seed. Recorded times: :class:`Measured`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any, Protocol

from hybridtrain.errors import UserError
from hybridtrain.util.files import read_text
from hybridtrain.util.option_types import Above0, check
from hybridtrain.util.tables import read_table, whole_number

Draw = Callable[[], float]


class TimeSource(Protocol):
    """Knows how long each worker's contributions take."""

    def stream(self, worker: int, seed: int) -> Draw:
        """Draws the worker's times, in seconds."""


# The parameter of each distribution beside its mean, with its default.
SHAPES: dict[str, tuple[str, float]] = {
    "constant": ("", 0.0),
    "exponential": ("", 0.0),
    "shifted_exponential": ("shift", 0.5),  # this share of the mean is always needed
    "pareto": ("alpha", 2.5),  # the tail's exponent; below 2 its variance is infinite
    "lognormal": ("sigma", 0.5),  # standard deviation of the logarithm
}


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


# ---- measured service times, repeated cyclically ------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Service times of n measured workers, for any number of workers.

    Worker w ≥ n has the times of worker ``w % n``, from a random start, so that workers with the
    same times do not run in step.

    Args:
        seconds: worker, from 0 on -> its service times.
        slower: worker -> factor of its times.

    Raises:
        UserError: if there are no times, or invalid ones.
    """

    seconds: Mapping[int, Sequence[float]]
    slower: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_slower(self.slower)
        if sorted(self.seconds) != list(range(len(self.seconds))) or not self.seconds:
            given = ", ".join(map(str, sorted(self.seconds))) or "nobody"
            raise UserError(
                f"service times of worker {given} were given; workers are numbered from 0, and at "
                "least one must have been measured"
            )
        for worker, times in self.seconds.items():
            bad = [x for x in times if not (x >= 0 and math.isfinite(x))]
            if bad or sum(times) <= 0:
                what = f"{bad[0]} s" if bad else "no time at all"
                raise UserError(
                    f"the service times of worker {worker} contain {what}; each must be a number "
                    "of seconds from 0 on, and their sum positive"
                )

    def stream(self, worker: int, seed: int) -> Draw:
        """The worker's service times."""
        own, factor = self._own(worker), self.slower.get(worker, 1.0)
        copied = worker >= len(self.seconds)
        start = Random(f"{seed}/{worker}").randrange(len(own)) if copied else 0
        times = islice(cycle(own), start, None)
        return lambda: factor * next(times)

    def expected_s(self, worker: int) -> float:
        """The mean of :meth:`stream`."""
        own = self._own(worker)
        return self.slower.get(worker, 1.0) * math.fsum(own) / len(own)

    def _own(self, worker: int) -> Sequence[float]:
        return self.seconds[worker % len(self.seconds)]


Times = ServiceTimes | Measured


def read_times(path: Path) -> dict[int, list[float]]:
    """Service times from a file.

    ``.json``: ``{"0": [0.1, 0.2], "1": [...]}``, worker -> seconds. Any other name: CSV with the
    columns ``worker`` and ``seconds``, one line per mini-batch. (Records of runs are read by
    :mod:`hybridtrain.engine.recording`.)

    Raises:
        UserError: naming the file and what is wrong with it.
    """
    found: dict[int, list[float]] = {}
    for worker, seconds in _json(path) if path.suffix == ".json" else _csv(path):
        found.setdefault(worker, []).append(seconds)
    return found


def _json(path: Path) -> Iterator[tuple[int, float]]:
    text = read_text(path, "service times from")
    try:
        content = json.loads(text, object_pairs_hook=_named_once)
        yield from [(int(w), float(x)) for w, times in content.items() for x in times]
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"from={path} holds no service times ({error}); wanted: a .json file of worker -> "
            "list of seconds, or a CSV file with the columns worker and seconds"
        ) from error


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a worker is there twice")
    return found


def _csv(path: Path) -> Iterator[tuple[int, float]]:
    for row in read_table(path, "service times from", ("worker", "seconds")):
        if row.fault:
            raise UserError(f"{path}, line {row.line}: {row.fault}")
        worker, seconds = row.cells["worker"], row.cells["seconds"]
        try:
            number, time = whole_number(worker), float(seconds)
        except ValueError:
            number = None
        if number is None:
            raise UserError(
                f"{path}, line {row.line}: worker {worker!r}, seconds {seconds!r} were given; "
                "wanted: a whole number, and a number with a decimal point"
            )
        yield number, time
