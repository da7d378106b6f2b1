"""One worker's part of an update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hybridtrain.memory import Packed


@dataclass(frozen=True, slots=True)
class Contribution:
    """The gradient row of ``worker`` counts with ``share`` (all shares of an update sum to 1).

    ``absent`` are the numbers of the parameters that got no gradient: their place in the row holds
    something old and must not be read. ``packed`` are the sparse ones, by number. ``staleness``:
    updates since its worker has read the parameters, where the update wants to know.
    """

    worker: int
    share: float
    absent: frozenset[int] = frozenset()
    packed: Mapping[int, Packed] = field(default_factory=dict)
    staleness: int = 0
