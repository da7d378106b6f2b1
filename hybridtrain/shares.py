"""Fixed shares of a global mini-batch."""

from __future__ import annotations


def dealt(sizes: tuple[int, ...]) -> list[list[int]]:
    """Which places of a global mini-batch belong to each worker, as evenly mixed as may be."""
    turns = sorted(((k + 0.5) / size, w) for w, size in enumerate(sizes) for k in range(size))
    owners: list[list[int]] = [[] for _ in sizes]
    for place, (_, worker) in enumerate(turns):
        owners[worker].append(place)
    return owners
