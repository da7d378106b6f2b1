"""Scripts of virtual time: workers die, join, or are slower for a while.

A script is a list of mappings, as YAML or in Python; each names a worker, or a list of them::

    - {worker: 3, dies_at: 10}
    - {worker: 3, joins_at: 25}                        # comes back
    - {worker: [6, 7], joins_at: 30}                   # not there before
    - {worker: 1, slower: 4, from: 5, until: 20}       # four times slower in between

A worker whose first event is ``joins_at`` is absent at the start. A dying worker loses its
mini-batch. A mini-batch is slower only in the part between ``from`` and ``until``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hybridtrain.errors import UserError
from hybridtrain.util.files import read_text
from hybridtrain.util.option_types import is_number

Finish = Callable[[float, float], float]  # begin, seconds of work at full speed -> end


@dataclass(frozen=True, slots=True)
class Dies:
    """The worker dies at this time."""

    at_s: float
    worker: int


@dataclass(frozen=True, slots=True)
class Joins:
    """The worker joins at this time."""

    at_s: float
    worker: int


@dataclass(frozen=True, slots=True)
class Slows:
    """The worker computes ``factor`` times slower between the two times."""

    worker: int
    factor: float
    from_s: float
    until_s: float


Event = Dies | Joins | Slows


@dataclass(frozen=True)
class Script:
    """Events in any order; raises UserError if they contradict each other."""

    events: tuple[Event, ...] = ()

    def __post_init__(self) -> None:
        for worker in {event.worker for event in self.events}:
            self._check_presence(worker)
            self._check_slowness(worker)

    @property
    def comings(self) -> list[Dies | Joins]:
        """Deaths and joins, by time, then by worker."""
        found = [event for event in self.events if not isinstance(event, Slows)]
        return sorted(found, key=lambda event: (event.at_s, event.worker))

    def absent(self) -> set[int]:
        """Workers that are absent at the start."""
        first: dict[int, Dies | Joins] = {}
        for event in self.comings:
            first.setdefault(event.worker, event)
        return {worker for worker, event in first.items() if isinstance(event, Joins)}

    def finishes(self, n_workers: int) -> dict[int, Finish]:
        """The :meth:`finish` of each worker that is slowed; raises as :meth:`check`."""
        self.check(n_workers)
        found = ((worker, self.finish(worker)) for worker in range(n_workers))
        return {worker: finish for worker, finish in found if finish}

    def check(self, n_workers: int) -> None:
        """Raises UserError if it names a worker that does not exist."""
        for event in self.events:
            if not 0 <= event.worker < n_workers:
                raise UserError(
                    f"script: worker {event.worker} was given, but {n_workers} workers have the "
                    f"numbers 0 to {n_workers - 1} (those that join later are counted)"
                )
        if len(self.absent()) == n_workers:
            raise UserError("script: all workers join later; somebody must be there at the start")

    def _check_presence(self, worker: int) -> None:
        """Deaths and joins must alternate."""
        own = [event for event in self.comings if event.worker == worker]
        for before, after in pairwise(own):
            if type(before) is type(after):
                what = "dies" if isinstance(after, Dies) else "joins"
                raise UserError(
                    f"script: worker {worker} {what} at {before.at_s:g} s and again at "
                    f"{after.at_s:g} s; in between it must {'join' if what == 'dies' else 'die'}"
                )

    def _check_slowness(self, worker: int) -> None:
        own = self._slows(worker)
        for before, after in pairwise(own):
            if after.from_s < before.until_s:
                raise UserError(
                    f"script: worker {worker} is slower from {before.from_s:g} to "
                    f"{before.until_s:g} s and from {after.from_s:g} s on; times must not overlap"
                )

    def _slows(self, worker: int) -> list[Slows]:
        found = [e for e in self.events if isinstance(e, Slows) and e.worker == worker]
        return sorted(found, key=lambda event: event.from_s)

    def finish(self, worker: int) -> Finish | None:
        """Computes when the worker ends a mini-batch; ``None``: it is never slowed."""
        slows = self._slows(worker)
        return None if not slows else lambda begin_s, work_s: _finish(slows, begin_s, work_s)


def _finish(slows: Sequence[Slows], begin_s: float, work_s: float) -> float:
    at_s = begin_s
    for each in slows:
        if each.until_s <= at_s:
            continue
        if at_s + work_s <= each.from_s:
            break
        work_s -= max(each.from_s - at_s, 0.0)
        at_s = max(at_s, each.from_s)
        if at_s + work_s * each.factor <= each.until_s:
            return at_s + work_s * each.factor
        work_s -= (each.until_s - at_s) / each.factor
        at_s = each.until_s
    return at_s + work_s


# ---- reading ------------------------------------------------------------------------------------

_FORMS = (
    "{worker: W, dies_at: t}, {worker: W, joins_at: t}, {worker: W, slower: X, from: t, until: t}"
)


def read_script(text: str) -> Script:
    """A script from a YAML file, if ``text`` ends with .yaml or .yml, or from ``text`` itself.

    Raises:
        UserError: naming the entry and what is wrong with it.
    """
    import yaml

    source = text
    if text.endswith((".yaml", ".yml")):
        source = read_text(text, "the script")
    try:
        entries = yaml.safe_load(source)
    except (yaml.YAMLError, RecursionError) as error:
        where = " ".join(str(error).split())
        raise UserError(f"script={text} is no YAML: {where}") from error
    if not isinstance(entries, list):
        raise UserError(f"script={text} was given; wanted: a list of {_FORMS}")
    return Script(tuple(event for entry in entries for event in _events(entry)))


def _events(entry: Any) -> Iterable[Event]:
    keys = frozenset(entry) if isinstance(entry, Mapping) else frozenset()
    workers = entry["worker"] if "worker" in keys else ()
    for worker in workers if isinstance(workers, list | tuple) else [workers]:
        if type(worker) is not int or worker < 0:
            raise UserError(f"script: {entry} was given; a worker is a whole number from 0 on")
        match sorted(keys, key=str):
            case ["dies_at", "worker"]:
                yield Dies(_seconds(entry, "dies_at"), worker)
            case ["joins_at", "worker"]:
                yield Joins(_seconds(entry, "joins_at"), worker)
            case ["from", "slower", "until", "worker"] | ["from", "slower", "worker"]:
                yield _slows(entry, worker)
            case _:
                raise UserError(f"script: {entry} was given; known are {_FORMS}")
    if "worker" not in keys:
        raise UserError(f"script: {entry} was given; known are {_FORMS}")


def _slows(entry: Mapping[str, Any], worker: int) -> Slows:
    begin = _seconds(entry, "from")
    end = _seconds(entry, "until") if "until" in entry else math.inf
    factor = _seconds(entry, "slower")
    if factor <= 0 or end <= begin:
        raise UserError(f"script: {entry} was given; slower > 0 and from < until are needed")
    return Slows(worker, factor, begin, end)


def _seconds(entry: Mapping[str, Any], key: str) -> float:
    value = entry[key]
    if not is_number(value) or not value >= 0:
        raise UserError(f"script: {entry} was given; {key} must be a number from 0 on")
    return float(value)
