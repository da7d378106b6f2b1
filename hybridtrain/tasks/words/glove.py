"""``task=glove``: vectors whose products are the logarithms of co-occurrences.

Pennington, Socher, Manning 2014. Each entry X of the table of co-occurrences is fitted by
w · c + b + b' with the weight min(1, (X / x_max)^α). AdaGrad steps every number by its own rate. As
in the authors' program the rate η enters the sums of squares, too, which begin at 1: that is
AdaGrad with rate 1 and sums that begin at 1/η². (There biases are stepped otherwise than vectors;
here they are not.)

Legend: V words, D dimensions, n entries.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Adagrad
from torch.utils.data import DataLoader

from hybridtrain.errors import UserError
from hybridtrain.tasks.shared_tables import MakeOptimizer, array, check_size
from hybridtrain.tasks.words.questions import Vectors
from hybridtrain.tasks.words.text_data import Errors, Ints, Stretches, TextData, Tokens
from hybridtrain.tasks.words.vectors_module import WordVectors
from hybridtrain.util.option_types import Above0, Natural, NotNegative, Positive, typed

# ---- co-occurrences -----------------------------------------------------------------------------
# Co-occurrence counts of words, in parts that fit into memory. A neighbour at distance d counts for
# 1/d. Threads count stretches of text (numpy's sort releases the GIL). A hash of its two words
# deals each entry to one of several files, the piles, so that a pile has all counts of its entries,
# in no order of words. Each pile fits into memory, where it is summed and shuffled.
#
# Legend: V words, n entries.

ENTRY = np.dtype([("row", "<i4"), ("column", "<i4"), ("count", "<f4")])
DEALT = np.dtype([("key", "<i8"), ("count", "<f4")])
Keys = NDArray[np.int64]
Counts = NDArray[np.float32]
_SORTING = 64  # bytes that an entry takes while it is sorted
_HASH = np.uint64(0x9E3779B97F4A7C15)


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
    sorting = 2 * window * _SORTING  # bytes, for each number of the text
    length = max(1000, memory // (threads * sorting))
    piles = [folder / f"pile{n}" for n in range(-(-len(numbers) * sorting // memory))]
    starts = range(0, len(numbers), length)

    def count(start: int) -> tuple[Keys, Counts]:
        known = min(start, window)
        return counted(np.array(numbers[start - known : start + length]), window, n_words, known)

    with ThreadPoolExecutor(threads) as pool:
        for first in range(0, len(starts), threads):  # no more stretches in memory than threads
            for keys, counts in pool.map(count, starts[first : first + threads]):
                _deal(keys, counts, piles)
    with path.open("wb") as out:
        total = sum(_shuffle(pile, n_words, out, random) for pile in piles)
    shutil.rmtree(folder)
    return total


def _deal(keys: Keys, counts: Counts, piles: Sequence[Path]) -> None:
    """Append each entry to the pile that the hash of its key names."""
    dealt = np.empty(len(keys), dtype=DEALT)
    dealt["key"], dealt["count"] = keys, counts
    mixed = (keys.astype(np.uint64) * _HASH) >> np.uint64(32)
    where = (mixed % np.uint64(len(piles))).astype(np.int64)
    ends = np.cumsum(np.bincount(where, minlength=len(piles)))
    parts = np.split(dealt[np.argsort(where, kind="stable")], ends[:-1])
    for pile, part in zip(piles, parts, strict=True):
        with pile.open("ab") as file:
            file.write(part.tobytes())


def _shuffle(pile: Path, n_words: int, out: BinaryIO, random: np.random.Generator) -> int:
    """Write the entries of a pile, summed, in random order; returns how many there are."""
    dealt = np.fromfile(pile, dtype=DEALT)
    pile.unlink()
    keys, counts = summed(dealt["key"], dealt["count"])
    entries = np.empty(len(keys), dtype=ENTRY)
    entries["row"], entries["column"] = np.divmod(keys, n_words)
    entries["count"] = counts
    out.write(entries[random.permutation(len(entries))].tobytes())
    return len(entries)


class Entries(Stretches):
    """Stretches of a file of entries."""

    dtype = ENTRY

    def of(self, index: int, numbers: Any) -> tuple[Tensor, ...]:
        """Rows and columns (n,) int32, counts (n,) float32."""
        return tuple(torch.from_numpy(numbers[name].copy()) for name in ENTRY.names or ())


_SQUARES = "squares"  # how the sums of squares are named in checkpoints
SIZES = (100_000, 2_000, 200)  # entries of a mini-batch: of compiled steps, of torch's, at least


class GloVe(WordVectors):
    """Vectors of words, and vectors of contexts; their sums are saved.

    Args:
        dim: D.
        rate: η of compiled steps.
        x_max: from how many co-occurrences on an entry weighs 1.
        alpha: α.
        compiled, save, directory, project, optimizer: see :class:`WordVectors`.
    """

    reads = "cooccurrences"

    @typed("model.")
    def __init__(
        self,
        dim: int = 50,
        rate: Above0 = 0.05,
        x_max: Above0 = 100.0,
        alpha: NotNegative = 0.75,
        compiled: bool | Literal["auto"] = "auto",
        save: Sequence[str] = ("vectors.bin",),
        directory: str | None = None,
        project: bool = False,
        optimizer: MakeOptimizer | None = None,
    ) -> None:
        like_compiled = partial(Adagrad, lr=1.0, initial_accumulator_value=rate**-2)
        super().__init__(dim, compiled, save, directory, project, optimizer or like_compiled)
        self.rate, self.x_max, self.alpha = rate, x_max, alpha
        self.tables = nn.ModuleList()  # of words and of contexts, and the biases of both
        self.squares = nn.ModuleList()  # the same, where steps are compiled

    def configure_model(self) -> None:
        """All at random, as soon as there are words."""
        if not self.has_words or self.tables:
            return
        n = len(self.vocabulary)
        kinds = 2 if self.steps_compiled else 1
        n_bytes = 8 * n * (self.dim + 1) * kinds
        check_size(n_bytes, self.workers, f"vectors of {n:,} words and {self.dim} dimensions")
        for width in (self.dim, self.dim, 1, 1):
            self.tables.append(table := nn.Embedding(n, width, sparse=True))
            nn.init.uniform_(table.weight, -0.5 / self.dim, 0.5 / self.dim)
            if self.steps_compiled:
                self.squares.append(table := nn.Embedding(n, width, sparse=True))
                nn.init.constant_(table.weight, self.rate**-2)

    def vectors(self) -> Vectors:
        """(V, D): sums of both vectors of a word."""
        words, contexts = list(self.tables.parameters())[:2]
        return (words + contexts).detach().cpu().numpy()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add or drop the sums of squares, which only compiled steps have."""
        super().on_load_checkpoint(checkpoint)
        state = checkpoint["state_dict"]
        for key in [key for key in state if key.startswith(_SQUARES)]:
            if not self.steps_compiled:
                del state[key]
        for key, value in self.squares.state_dict(prefix=f"{_SQUARES}.").items():
            state.setdefault(key, value)

    # ---- steps ----------------------------------------------------------------------------------

    def num_samples(self, batch: Any) -> int:
        """Samples are entries."""
        return len(batch[0])

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        """A stretch of entries; returns the sum of their losses, the mean for compiled steps."""
        n = len(batch[0])
        if self.steps_compiled:
            mean = loss = torch.tensor(self._step(*batch) / n)  # which progress shows
        else:
            loss = self.loss(*batch)
            mean = loss.detach() / n
        self.tell(mean, n, "entries/s")
        return loss

    def _step(self, rows: Tensor, columns: Tensor, counts: Tensor) -> float:
        from hybridtrain.tasks.words.word_kernels import glove_steps

        tables, squares = (tuple(map(array, x.parameters())) for x in (self.tables, self.squares))
        entries = (rows.numpy(), columns.numpy(), counts.numpy())
        return glove_steps(tables, squares, entries, self.x_max, self.alpha)

    def loss(self, rows: Tensor, columns: Tensor, counts: Tensor) -> Tensor:
        """The sum of the losses, by torch's operations."""
        rows, columns = rows.long(), columns.long()
        words, contexts, bias, context_bias = self.tables
        found = (words(rows) * contexts(columns)).sum(1)
        gap = found + bias(rows)[:, 0] + context_bias(columns)[:, 0] - counts.log()
        share = (counts / self.x_max).clamp(max=1.0) ** self.alpha
        return (0.5 * share * gap * gap).sum()


class Cooccurrences(TextData):
    """Entries of the table of co-occurrences of a text.

    Args:
        files, tokens, lower, encoding_errors, min_count, max_words, num_workers, cache: see
            :class:`TextData`.
        batch_entries: of each worker's mini-batch; auto: 100,000 for compiled steps, else 2,000,
            and fewer where there are few.
        window: neighbours on each side; one at distance d counts for 1/d.
        memory: bytes that counting may use; more text is counted in parts, and these are merged.
        threads: how many count at once.
        seed: of the order of entries.

    Raises:
        UserError: if an option makes no sense.
    """

    kind = "cooccurrences"

    @typed("data.")
    def __init__(
        self,
        files: str | Sequence[str] | None = None,
        tokens: Tokens = "words",
        lower: bool = True,
        encoding_errors: Errors = "strict",
        min_count: int = 5,
        max_words: int | None = None,
        batch_entries: Positive | Literal["auto"] = "auto",
        window: Positive = 10,
        memory: Positive = 1 << 30,
        threads: Positive = 2,
        seed: Natural = 0,
        num_workers: int = 0,
        cache: str | None = None,
    ) -> None:
        text = files, tokens, lower, encoding_errors, min_count, max_words
        super().__init__(*text, num_workers=num_workers, cache=cache)
        self.window, self.memory, self.threads, self.seed = window, memory, threads, seed
        self.batch_entries = batch_entries

    @property
    def _entries(self) -> Path:
        return self.folder / "entries"

    def _write(self) -> None:
        super()._write()
        self.setup()
        numbers = np.memmap(self.folder / "numbers.int32", dtype=np.int32, mode="r")
        n_words = len(self.vocabulary)
        given = (self._entries, self.memory, self.threads, self.seed)
        if count_cooccurrences(numbers, n_words, self.window, *given) == 0:
            raise UserError(
                "no two words of the text stand in one line; give text with longer lines, or a "
                "smaller data.min_count"
            )

    def train_dataloader(self) -> DataLoader[Any]:
        """Stretches of entries, in another order each epoch."""
        length = self.batch_length(self.batch_entries, len(Entries(self._entries, 1)), SIZES)
        return Entries(self._entries, length).loader(self.num_workers)
