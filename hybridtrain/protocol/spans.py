"""Stretches of an epoch's order, as (start, stop): what is to be done, drawn, or left."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

Span = tuple[int, int]
Spans = tuple[Span, ...]


def total(spans: Iterable[Span]) -> int:
    """How many positions."""
    return sum(stop - start for start, stop in spans)


def positions(spans: Iterable[Span]) -> Iterator[int]:
    """All of them, in turn."""
    for start, stop in spans:
        yield from range(start, stop)


def split(spans: Iterable[Span], n: int) -> tuple[Spans, Spans]:
    """The first ``n`` positions (or all, if there are fewer), and the rest."""
    head: list[Span] = []
    tail: list[Span] = []
    for start, stop in spans:
        cut = min(stop, start + max(n, 0))
        n -= cut - start
        head += [(start, cut)] if cut > start else []
        tail += [(cut, stop)] if stop > cut else []
    return tuple(head), tuple(tail)


def without(spans: Iterable[Span], taken: Iterable[Span]) -> Spans:
    """What is left of ``spans``, in their order, where nobody has ``taken`` it."""
    left = list(spans)
    for begin, end in taken:
        parts = [((a, min(b, begin)), (max(a, end), b)) for a, b in left]
        left = [(a, b) for pair in parts for a, b in pair if b > a]
    return tuple(left)


def common(spans: Iterable[Span], others: Iterable[Span]) -> Spans:
    """What of ``spans``, in their order, is in the ``others``, too; these are in order."""
    known, found = tuple(others), list[Span]()
    for start, stop in spans:
        for begin, end in known:
            if begin < stop and start < end:
                found.append((max(start, begin), min(stop, end)))
    return tuple(found)


def merged(spans: Iterable[Span]) -> Spans:
    """In order, neighbours joined."""
    joined: list[Span] = []
    for start, stop in sorted(spans):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        elif stop > start:
            joined.append((start, stop))
    return tuple(joined)


def dealt(sizes: tuple[int, ...]) -> list[list[int]]:
    """Which places of a global mini-batch belong to each worker, as evenly mixed as may be.

    The first one belongs to the first worker, who logs for all and so is to have a part in each.
    """
    turns = sorted(((k + 0.5) / size, w) for w, size in enumerate(sizes) for k in range(size))
    owners: list[list[int]] = [[] for _ in sizes]
    for place, (_, worker) in enumerate(turns):
        owners[worker].append(place)
    first = next(own for own in owners if own[0] == 0)
    first[0], owners[0][0] = owners[0][0], 0
    return [sorted(own) for own in owners]
