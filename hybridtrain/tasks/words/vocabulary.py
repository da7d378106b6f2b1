"""The words that get a vector, how often each occurs, and what sampling and softmax need of that.

Legend: V words, V − 1 inner nodes of the Huffman tree, T turns of all its paths together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridtrain.errors import UserError

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Vocabulary:
    """``words`` and their ``counts`` (V,), from the most frequent on; equal ones by the alphabet.

    ``total``: how many words the text has, with those that are in no vocabulary.
    """

    words: tuple[str, ...]
    counts: NDArray[np.int64]
    total: int

    @classmethod
    def of(cls, counted: Counter[str], min_count: int = 5, size: int | None = None) -> Vocabulary:
        """The ``size`` most frequent words, of those that occur ``min_count`` times.

        Raises:
            UserError: if fewer than two are left.
        """
        total = sum(counted.values())
        frequent = [(-n, word) for word, n in counted.items() if n >= min_count]
        frequent.sort()
        del frequent[len(frequent) if size is None else size :]
        if not counted:
            raise UserError("the text has no words; look at data.files and data.tokens")
        if len(frequent) < 2:
            most = max(counted.values())
            raise UserError(
                f"of {len(counted):,} different words {len(frequent)} occur data.min_count="
                f"{min_count} times (the most frequent one {most:,}), and vectors need at least 2; "
                "give a smaller data.min_count, or more text"
            )
        counts = np.array([-n for n, _ in frequent], dtype=np.int64)
        return cls(tuple(word for _, word in frequent), counts, total)

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def number_of(self) -> dict[str, int]:
        """The row of each word."""
        return {word: number for number, word in enumerate(self.words)}

    def kept(self, sample: float) -> Floats:
        """(V,): probability to keep an occurrence in subsampling (Mikolov et al. 2013).

        ``sample``: the share of the text from which on a word is thinned out; 0: none is.
        """
        if sample <= 0:
            return np.ones(len(self), dtype=np.float32)
        share = self.counts / self.counts.sum()
        return np.minimum(1.0, np.sqrt(sample / share) + sample / share).astype(np.float32)


def count(pieces: Iterable[tuple[Sequence[str], bool]]) -> Counter[str]:
    """How often each word occurs."""
    counted: Counter[str] = Counter()
    for words, _ in pieces:
        counted.update(words)
    return counted


def alias_table(weights: NDArray[Any]) -> tuple[Floats, Ints]:
    """Draw row r, r uniform; keep it with probability ``kept[r]``, else take ``other[r]``.

    Then each is drawn as often as its weight says (Walker's alias method).
    """
    n = len(weights)
    share = weights / weights.sum() * n
    kept, other = np.ones(n, dtype=np.float32), np.arange(n, dtype=np.int32)
    small = [row for row in range(n) if share[row] < 1.0]
    large = [row for row in range(n) if share[row] >= 1.0]
    while small and large:
        row, rich = small.pop(), large[-1]
        kept[row], other[row] = share[row], rich
        share[rich] -= 1.0 - share[row]
        if share[rich] < 1.0:
            small.append(large.pop())
    return kept, other


@dataclass(frozen=True)
class Paths:
    """Paths of hierarchical softmax from the root to each word; frequent words have short ones.

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
