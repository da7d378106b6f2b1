"""The binary tree of hierarchical softmax: a short path for frequent words.

Legend: V words, V − 1 inner nodes, T turns of all paths together.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Paths:
    """From the root to each word.

    ``starts`` (V + 1,): where the path of each word begins in ``nodes`` (T,), the inner nodes that
    it passes, and in ``turns`` (T,): 1 where it goes to the heavier side.
    """

    starts: NDArray[np.int64]
    nodes: NDArray[np.int32]
    turns: NDArray[np.int8]


def huffman(counts: NDArray[Any]) -> Paths:
    """The tree in which the mean path, weighted by ``counts`` (V,), is shortest."""
    n = len(counts)
    heap = [(int(count), number) for number, count in enumerate(counts)]
    heapify(heap)
    parent, turn = np.zeros(2 * n - 1, dtype=np.int64), np.zeros(2 * n - 1, dtype=np.int8)
    for node in range(n, 2 * n - 1):
        (light, one), (heavy, other) = heappop(heap), heappop(heap)
        parent[one] = parent[other] = node
        turn[other] = 1
        heappush(heap, (light + heavy, node))
    root, starts = 2 * n - 2, [0]
    nodes: list[int] = []
    turns: list[int] = []
    for word in range(n):
        at, path, taken = word, [], []
        while at != root:
            taken.append(turn[at])
            at = int(parent[at])
            path.append(at - n)
        nodes += reversed(path)
        turns += reversed(taken)
        starts.append(len(nodes))
    return Paths(
        np.array(starts, dtype=np.int64),
        np.array(nodes, dtype=np.int32),
        np.array(turns, dtype=np.int8),
    )
