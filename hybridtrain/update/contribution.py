"""One worker's part of an update."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Contribution:
    """The gradient row of ``worker`` counts with ``share`` (all shares of an update sum to 1).

    ``absent`` are the numbers of the parameters that got no gradient: their place in the row holds
    something old and must not be read.
    """

    worker: int
    share: float
    absent: frozenset[int] = frozenset()
