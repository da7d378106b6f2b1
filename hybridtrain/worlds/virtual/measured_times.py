"""Measured service times, repeated cyclically."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, cycle, islice
from pathlib import Path
from random import Random

from hybridtrain.errors import UserError
from hybridtrain.util.input_files import read_text
from hybridtrain.worlds.virtual.service_times import Draw, check_slower


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


def read_times(path: Path) -> dict[int, list[float]]:
    """Service times from a file.

    ``.json``: ``{"0": [0.1, 0.2], "1": [...]}``, worker -> seconds. Any other name: CSV with the
    columns ``worker`` and ``seconds``, one line per mini-batch. (Records of runs are read by
    :mod:`hybridtrain.recording`.)

    Raises:
        UserError: naming the file and what is wrong with it.
    """
    text = read_text(path, "service times from")
    try:
        pairs = list(_json(text) if path.suffix == ".json" else _csv(text))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, csv.Error) as error:
        raise UserError(
            f"from={path} holds no service times ({error}); wanted: a .json file of worker -> "
            "list of seconds, or a CSV file with the columns worker and seconds"
        ) from error
    found: dict[int, list[float]] = {}
    for worker, seconds in pairs:
        found.setdefault(worker, []).append(seconds)
    return found


def _json(text: str) -> Iterator[tuple[int, float]]:
    lists = ([(int(w), float(x)) for x in times] for w, times in json.loads(text).items())
    return chain.from_iterable(lists)


def _csv(text: str) -> Iterator[tuple[int, float]]:
    lines = csv.DictReader(text.splitlines())
    return ((int(line["worker"]), float(line["seconds"])) for line in lines)
