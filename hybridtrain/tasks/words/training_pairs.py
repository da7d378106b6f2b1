"""What predicts what in a stretch of text, all at once, for steps by torch's operations.

Legend: N numbers of a stretch, M pairs, w window.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridtrain.tasks.words.vocabulary import Floats, Ints

Rows = NDArray[np.int64]


def thinned(numbers: Ints, keep: Floats, random: np.random.Generator) -> Rows:
    """(N,): a stretch without the occurrences that are left out."""
    chance = random.random(len(numbers), dtype=np.float32)
    stays = (numbers < 0) | (chance < keep[np.maximum(numbers, 0)])
    return numbers[stays].astype(np.int64)


def neighbours(left: Rows, window: int, random: np.random.Generator) -> tuple[Rows, Rows]:
    """(M,) each: places of words, and of their neighbours within a window shortened at random."""
    lines = np.cumsum(left < 0)
    reach = random.integers(1, window + 1, len(left))
    centres, others = [], []
    for distance in range(1, window + 1):
        first = np.arange(len(left) - distance)
        near = (lines[first] == lines[first + distance]) & (left[first] >= 0)
        for one, other in ((first, first + distance), (first + distance, first)):
            chosen = near & (reach[one] >= distance)
            centres.append(one[chosen])
            others.append(other[chosen])
    return np.concatenate(centres), np.concatenate(others)


def drawn(kept: Floats, other: Ints, shape: tuple[int, int], random: np.random.Generator) -> Rows:
    """Rows of an alias table."""
    rows = random.integers(0, len(kept), shape)
    chance = random.random(shape, dtype=np.float32)
    return np.where(chance < kept[rows], rows, other[rows])


def bags(centres: Rows, others: Rows) -> tuple[Rows, Rows, Any]:
    """The neighbours of each word together: the words, all neighbours, where each bag begins."""
    order = np.argsort(centres, kind="stable")
    words, starts = np.unique(centres[order], return_index=True)
    return words, others[order], starts
