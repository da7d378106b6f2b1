"""Measure an exchange and update from ten thousand to a hundred million parameters.

With 1, 2, 4 and 8 workers on however many cores there are. Beside it what gloo and fused Adam take
for the same, where that is bearable and fits into memory. ``grows`` rows ask whether the time is
linear: tenfold parameters should take tenfold the time, at most, where memory and not waking is
what counts; and eight workers, whose rows are four times as many, at most four times that of two.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from benchmarks.frame import Frame
from benchmarks.rows import NOTHING_ASKED, Goal, Row, Skipped, compare
from benchmarks.runs import Job

SIZES = {"1e4": 10**4, "1e5": 10**5, "1e6": 10**6, "1e7": 10**7, "1e8": 10**8}
WORKERS = (1, 2, 4, 8)
_BEARABLE = 2 * 10**7  # parameters × workers of gloo's
_LONG = 5 * 10**7  # parameters of which one run is enough
_LINEAR = Goal(1.1, of="time")
_UNIT = "ms/exchange"
Taken = dict[tuple[str, int], Row]


def rows(frame: Frame) -> Iterator[Row | Skipped]:
    """The grid, and how it grows."""
    quick, taken = frame.options.quick, Taken()
    for name in list(SIZES)[: 2 if quick else None]:
        for workers in (2,) if quick else WORKERS:
            for row in _cell(frame, name, workers):
                if isinstance(row, Row):
                    taken[name, workers] = row
                yield row
    yield from _growth(frame, taken)


def _cell(frame: Frame, name: str, workers: int) -> Iterator[Row | Skipped]:
    size, work = SIZES[name], f"{name} parameters, {workers} worker{'s' * (workers > 1)}"
    ours = _job(frame, "hybrid", size, workers)
    if workers > 1 and size * workers <= _BEARABLE:
        against = [(_job(frame, "gloo", size, workers), NOTHING_ASKED)]
        yield from frame.alternate(work, ours, against, _UNIT)
    else:
        yield from frame.alone(work, ours, _UNIT, repeats=1 if size > _LONG else None)


def _job(frame: Frame, way: str, parameters: int, workers: int) -> Job:
    arguments = {"parameters": parameters, "workers": workers}
    arguments |= {"seconds": min(0.3, frame.options.seconds)}
    return Job(_LABELS[way], f"benchmarks.jobs.exchange:{way}", arguments)


_LABELS = {"hybrid": "hybrid", "gloo": "gloo all-reduce, fused Adam"}


def _growth(frame: Frame, taken: Taken) -> Iterator[Row]:
    """Against tenfold for ten times the parameters, fourfold for four times the workers."""
    for small, large in pairwise(list(SIZES)[1:]):
        if (small, 2) in taken and (large, 2) in taken:
            work = f"grows from {small} to {large} parameters, 2 workers"
            yield _grown(frame, work, taken[small, 2], taken[large, 2], 10)
    for name in SIZES:
        if (name, 2) in taken and (name, 8) in taken:
            work = f"grows from 2 to 8 workers, {name} parameters"
            yield _grown(frame, work, taken[name, 2], taken[name, 8], 4)


def _grown(frame: Frame, work: str, small: Row, large: Row, times: int) -> Row:
    names = (frame.part, work, "hybrid", f"{times} times the smaller one")
    return compare(names, [large.ours], [times * small.ours], _UNIT, _LINEAR)
