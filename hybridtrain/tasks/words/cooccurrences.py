"""Co-occurrence counts of words, in parts that fit into memory, merged on disk and shuffled.

A neighbour at distance d counts for 1/d. Threads count and sort stretches of text (numpy's sort
releases the GIL) and write sorted runs. One pass merges the runs, reading a part of each, and deals
the entries at random to piles that fit into memory, where each pile is shuffled.

Legend: V words, n entries.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridtrain.tasks.words.text_data import Stretches
from hybridtrain.tasks.words.vocabulary import Ints

ENTRY = np.dtype([("row", "<i4"), ("column", "<i4"), ("count", "<f4")])
RUN = np.dtype([("key", "<i8"), ("count", "<f4")])
Keys = NDArray[np.int64]
Counts = NDArray[np.float32]
_SORTING = 64  # bytes that an entry takes while it is sorted


def counted(numbers: Ints, window: int, n_words: int, known: int = 0) -> tuple[Keys, Counts]:
    """Keys ``row * V + column`` of one stretch, ascending and unique, and their counts.

    Pairs among the first ``known`` numbers have been counted with the stretch before.
    """
    lines, keys, counts = np.cumsum(numbers < 0), [], []
    wide = numbers.astype(np.int64)
    for distance in range(1, min(window, len(numbers) - 1) + 1):
        first, second = wide[:-distance], wide[distance:]
        near = (lines[:-distance] == lines[distance:]) & (first >= 0) & (second >= 0)
        near[: max(0, known - distance)] = False
        one, other = first[near], second[near]
        for row, column in ((one, other), (other, one)):
            keys.append(row * n_words + column)
            counts.append(np.full(len(row), 1.0 / distance, dtype=np.float32))
    if not keys:
        return np.empty(0, np.int64), np.empty(0, np.float32)
    return summed(np.concatenate(keys), np.concatenate(counts))


def summed(keys: Keys, counts: Counts) -> tuple[Keys, Counts]:
    """Ascending, each key once, with the sum of its counts."""
    if not len(keys):
        return keys, counts
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    starts = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
    return keys[starts], np.add.reduceat(counts[order], starts, dtype=np.float64).astype(np.float32)


def write_runs(
    numbers: Ints, window: int, n_words: int, folder: Path, memory: int, threads: int
) -> list[Path]:
    """Sorted runs of the whole text, which together were never more than ``memory`` bytes."""
    length = max(1000, memory // (threads * 2 * window * _SORTING))
    starts = range(0, len(numbers), length)

    def write(start: int) -> Path:
        known = min(start, window)
        stretch = np.array(numbers[start - known : start + length])
        keys, counts = counted(stretch, window, n_words, known)
        run = np.empty(len(keys), dtype=RUN)
        run["key"], run["count"] = keys, counts
        path = folder / f"run{start // length}"
        path.write_bytes(run.tobytes())
        return path

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(write, starts))


def merged(paths: Sequence[Path], memory: int) -> Iterator[tuple[Keys, Counts]]:
    """All runs as one, part by part, ascending."""
    runs: list[Any] = [np.memmap(p, RUN, "r") for p in paths if p.stat().st_size]
    heads = [0] * len(runs)
    part = max(1, memory // (max(len(runs), 1) * _SORTING))
    while left := [n for n, run in enumerate(runs) if heads[n] < len(run)]:
        looks = {n: runs[n][heads[n] : heads[n] + part] for n in left}
        upto = min(look["key"][-1] for look in looks.values())
        keys, counts = [], []
        for n, look in looks.items():
            end = int(np.searchsorted(look["key"], upto, side="right"))
            keys.append(look["key"][:end])
            counts.append(look["count"][:end])
            heads[n] += end
        yield summed(np.concatenate(keys), np.concatenate(counts))


def count_cooccurrences(
    numbers: Ints,
    n_words: int,
    window: int,
    path: Path,
    memory: int = 1 << 30,
    threads: int = 1,
    seed: int = 0,
) -> int:
    """Write all entries in random order to ``path``; returns how many there are.

    Args:
        numbers: of the text, with −1 behind each line.
        n_words: V.
        window: neighbours on each side.
        path: of the file; temporary files lie beside it.
        memory: bytes to use, about.
        threads: how many count at once.
        seed: of the order.
    """
    random = np.random.default_rng(seed)
    folder = path.with_name(path.name + ".parts")
    folder.mkdir(parents=True, exist_ok=True)
    runs = write_runs(numbers, window, n_words, folder, memory, threads)
    at_most = sum(run.stat().st_size for run in runs) // RUN.itemsize
    n_piles = max(1, -(-at_most * 4 * ENTRY.itemsize // memory))
    piles = [folder / f"pile{n}" for n in range(n_piles)]
    with ExitStack() as opened:
        files = [opened.enter_context(pile.open("wb")) for pile in piles]
        total = _deal(merged(runs, memory), n_words, files, random)
    with path.open("wb") as out:
        for pile in piles:
            entries = np.fromfile(pile, dtype=ENTRY)
            out.write(entries[random.permutation(len(entries))].tobytes())
            pile.unlink()
    shutil.rmtree(folder)
    return total


def _deal(
    parts: Iterable[tuple[Keys, Counts]],
    n_words: int,
    files: Sequence[BinaryIO],
    random: np.random.Generator,
) -> int:
    """Write each entry to any of the files; returns how many there were."""
    total = 0
    for keys, counts in parts:
        entries = np.empty(len(keys), dtype=ENTRY)
        entries["row"], entries["column"] = np.divmod(keys, n_words)
        entries["count"] = counts
        where = random.integers(0, len(files), len(keys))
        for n, file in enumerate(files):
            file.write(entries[where == n].tobytes())
        total += len(keys)
    return total


class Entries(Stretches):
    """Stretches of a file of entries."""

    dtype = ENTRY

    def of(self, index: int, numbers: Any) -> tuple[Tensor, ...]:
        """Rows and columns (n,) int32, counts (n,) float32."""
        return tuple(torch.from_numpy(numbers[name].copy()) for name in ENTRY.names or ())
