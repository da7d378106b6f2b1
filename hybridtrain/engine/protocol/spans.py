"""Ranges of positions in an epoch's order, as (start, stop)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

Span = tuple[int, int]
Spans = tuple[Span, ...]


def total(spans: Iterable[Span]) -> int:
    """The number of positions."""
    return sum(stop - start for start, stop in spans)


def positions(spans: Iterable[Span]) -> Iterator[int]:
    """All positions, in order."""
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
    """``spans`` without the positions of ``taken``, in their order."""
    remaining = list(spans)
    for begin, end in taken:
        parts = [((a, min(b, begin)), (max(a, end), b)) for a, b in remaining]
        remaining = [(a, b) for pair in parts for a, b in pair if b > a]
    return tuple(remaining)


def common(spans: Iterable[Span], others: Iterable[Span]) -> Spans:
    """The positions of ``spans``, in their order, that are also in ``others``, which ascend."""
    known, found = tuple(others), list[Span]()
    for start, stop in spans:
        for begin, end in known:
            if begin < stop and start < end:
                found.append((max(start, begin), min(stop, end)))
    return tuple(found)


def merged(spans: Iterable[Span]) -> Spans:
    """The same positions, ascending, adjacent spans joined."""
    joined: list[Span] = []
    for start, stop in sorted(spans):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        elif stop > start:
            joined.append((start, stop))
    return tuple(joined)


def shares_of(sizes: tuple[int, ...]) -> list[list[int]]:
    """The positions of a global mini-batch that each worker gets, mixed as evenly as possible.

    Position 0 is the first worker's: it logs for all, so it needs a part of each mini-batch.
    """
    turns = sorted(((k + 0.5) / size, w) for w, size in enumerate(sizes) for k in range(size))
    owners: list[list[int]] = [[] for _ in sizes]
    for place, (_, worker) in enumerate(turns):
        owners[worker].append(place)
    first = next(own for own in owners if own[0] == 0)
    first[0], owners[0][0] = owners[0][0], 0
    return [sorted(own) for own in owners]
