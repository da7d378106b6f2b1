"""Text for ``task=word2vec`` and ``task=glove``: files in, stretches of numbers out."""

from __future__ import annotations

import re
import shutil
import sys
import unicodedata
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple

import numpy as np
import pytorch_lightning as pl
import torch
from numpy.typing import NDArray
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hybridtrain.errors import UserError
from hybridtrain.util.files import check_input, unpacked
from hybridtrain.util.option_types import Natural, Positive, Range, typed

# ---- the vocabulary -----------------------------------------------------------------------------
# The words that get a vector, how often each occurs, and what sampling and softmax need of that.
# Legend: V words, V − 1 inner nodes of the Huffman tree, T turns of all its paths together.

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


class Paths(NamedTuple):
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


# ---- text files ---------------------------------------------------------------------------------
# Text files of any size: words, line by line, and their numbers in a file that is mapped.
# Legend: N numbers: words, and an END behind every line.

LONGEST = 1 << 20  # bytes of a line that are looked at together
LONGEST_WORD = 1 << 24
_WORD = re.compile(r"\w+(?:['’]\w+)*")  # of text in ASCII
Tokens = Literal["words", "spaces"]
Errors = Literal["strict", "replace", "ignore"]


class TextFiles:
    """Some files, read in their order.

    Args:
        files: paths; what is compressed with gzip is known by its first bytes.
        tokens: ``words``: runs of letters and digits; ``spaces``: whatever lies between spaces.
        lower: make all letters small.
        errors: what to do with bytes that are no UTF-8: ``strict`` raises, ``replace`` puts U+FFFD
            there, ``ignore`` leaves them out.

    Raises:
        UserError: if a file is missing, or an option is none of those.
    """

    @typed("data.")
    def __init__(
        self,
        files: Sequence[str | Path],
        tokens: Tokens = "words",
        lower: bool = True,
        errors: Errors = "strict",
    ) -> None:
        self.files = [Path(file) for file in files]
        if not self.files:
            raise UserError("data.files is empty; name at least one text file")
        for file in self.files:
            check_input(file, "data.files:")
        self._split = _words_in if tokens == "words" else str.split
        self._lower, self._errors = lower, errors

    def __iter__(self) -> Iterator[tuple[list[str], bool]]:
        """Words that follow one another, and whether their line ends behind them."""
        for path in self.files:
            with unpacked(path) as file:
                for number, block, ends in blocks(path, file):
                    yield self._words(path, number, block), ends

    def _words(self, path: Path, number: int, block: bytes) -> list[str]:
        try:
            text = block.decode("utf-8-sig" if number == 1 else "utf-8", self._errors)
            text = unicodedata.normalize("NFC", text)
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path}, line {number}: byte {error.object[error.start]:#04x} is no UTF-8; "
                "convert the file, or give data.encoding_errors=replace or ignore"
            ) from None
        return self._split(text.lower() if self._lower else text)


def _words_in(text: str) -> list[str]:
    if text.isascii():
        return _WORD.findall(text)
    return _word_of_any_script().findall(text)


@cache
def _word_of_any_script() -> re.Pattern[str]:
    """Python's ``\\w`` has no marks (vowel signs, accents), and no joiners of Indic scripts."""
    letters = map(chr, range(sys.maxunicode))
    marks = "".join(x for x in letters if unicodedata.category(x).startswith("M"))
    word = rf"\w(?:[\w{marks}]|[\u200c\u200d](?=\w))*"
    return re.compile(f"{word}(?:['’]{word})*")


def blocks(path: Path, file: BinaryIO) -> Iterator[tuple[int, bytes, bool]]:
    """Yield line number, a block of the line cut at a space, whether the line ends with it."""
    number, left = 1, b""
    while line := file.readline(LONGEST):
        line, ends = left + line, line.endswith(b"\n")
        left = b""
        if not ends and (cut := max(line.rfind(b" "), line.rfind(b"\t"))) >= 0:
            line, left = line[:cut], line[cut:]
        elif not ends:  # within a word; or the file's last
            left = line
            if len(left) > LONGEST_WORD:
                raise UserError(
                    f"{path}, line {number}: {len(left):,} bytes without a space are no text"
                )
            continue
        yield number, line, ends
        number += ends
    if left:
        yield number, left, True


END = -1  # of a line
_BUFFER = 1 << 20  # numbers


def encode(
    pieces: Iterable[tuple[Sequence[str], bool]], number_of: Mapping[str, int], path: Path
) -> int:
    """Write the numbers of all words that have one; returns how many words were written."""
    buffer: list[int] = []
    n_words, within = 0, False  # a line
    with path.open("wb") as file:

        def flush() -> None:
            file.write(np.array(buffer, dtype=np.int32).tobytes())
            buffer.clear()

        for words, ends in pieces:
            found = [number for word in words if (number := number_of.get(word)) is not None]
            n_words += len(found)
            buffer += found
            within = within or bool(found)
            if ends and within:
                buffer.append(END)
                within = False
            if len(buffer) >= _BUFFER:
                flush()
        flush()
    return n_words


class Stretches(Dataset[Any]):
    """Stretches of a file of numbers, all of the same length but for the last.

    Args:
        path: of the file.
        length: numbers in a stretch.
    """

    dtype: Any = np.int32

    def __init__(self, path: Path, length: int) -> None:
        self._path, self._length = path, length
        self._numbers: Any = np.memmap(path, dtype=self.dtype, mode="r")

    def __len__(self) -> int:
        return -(-len(self._numbers) // self._length)

    def __getitem__(self, index: int) -> Any:
        """See :meth:`of`.

        Raises:
            IndexError: if there is no such stretch.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"stretch {index} of {len(self)}")
        return self.of(index, self._numbers[index * self._length : (index + 1) * self._length])

    @abstractmethod
    def of(self, index: int, numbers: Any) -> Any:
        """The sample made of these numbers, a view of the file."""

    def __getstate__(self) -> tuple[Path, int]:
        return self._path, self._length

    def __setstate__(self, state: tuple[Path, int]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def loader(self, num_workers: int) -> DataLoader[Any]:
        """A loader with one stretch a mini-batch, in another order each epoch."""
        return DataLoader(
            self, batch_size=1, shuffle=True, collate_fn=_only, num_workers=num_workers
        )


class EncodedText(Stretches):
    """Stretches of an encoded text."""

    def of(self, index: int, numbers: Ints) -> tuple[int, Tensor]:
        """Which stretch, and its numbers (n,) int32."""
        return index, torch.from_numpy(numbers.copy())


def _only(stretches: Sequence[Any]) -> Any:
    """The one stretch that is a mini-batch."""
    (stretch,) = stretches
    return stretch


SIZES = (20_000, 1_000, 250)  # words of a mini-batch: of compiled steps, of torch's, at least
_PARTS = 16  # mini-batches of each worker in an epoch, at least, where there are words for it


def shipped(path: Path) -> list[Path]:
    """A text that comes with Python: its language reference, written to ``path``."""
    from pydoc_data.topics import topics

    path.write_text("\n".join(topics[name] for name in sorted(topics)), encoding="utf-8")
    rank_zero_info("No data.files given: the text is the language reference that Python brings.")
    return [path]


FromTwo = Annotated[int, Range(2)]


class TextData(pl.LightningDataModule):
    """Words of text files, as numbers.

    The text is read twice when training begins, and its numbers are written to a file (4 bytes a
    word), which is removed at the end; neither has to fit into memory, only the words that differ.

    Args:
        files: one path or many, of plain or gzipped UTF-8; null: a text that Python brings.
        tokens: ``words``: runs of letters and digits; ``spaces``: what lies between spaces.
        lower: make all letters small.
        encoding_errors: bytes that are no UTF-8: ``strict`` ends the run, ``replace``, ``ignore``.
        min_count: words that occur less often get no vector.
        max_words: how many words get one at most, the most frequent; null: no limit.
        batch_words: of each worker's mini-batch; auto: 20,000 for compiled steps, else 1,000, and
            less where the text is short.
        num_workers: processes that load, for each worker.
        cache: folder for the numbers; null: in the trainer's ``default_root_dir``.

    Raises:
        UserError: if an option makes no sense.
    """

    kind = "text"
    vocabulary: Vocabulary  # read by setup

    @typed("data.")
    def __init__(
        self,
        files: str | Sequence[str] | None = None,
        tokens: Tokens = "words",
        lower: bool = True,
        encoding_errors: Errors = "strict",
        min_count: Positive = 5,
        max_words: FromTwo | None = None,
        batch_words: FromTwo | Literal["auto"] = "auto",
        num_workers: Natural = 0,
        cache: str | None = None,
    ) -> None:
        super().__init__()
        self.files = [files] if isinstance(files, str) else files
        self.reading: dict[str, Any] = {"tokens": tokens, "lower": lower, "errors": encoding_errors}
        if self.files is not None:
            TextFiles(self.files, **self.reading)  # raises before training starts
        self.min_count, self.max_words, self.batch_words = min_count, max_words, batch_words
        self.num_workers, self.cache = num_workers, cache

    @property
    def folder(self) -> Path:
        """Where numbers lie while training goes on."""
        assert self.trainer is not None, "Lightning gives it"
        return Path(self.cache or self.trainer.default_root_dir) / "text-numbers"

    def prepare_data(self) -> None:
        """Count the words and write their numbers, in one process.

        Raises:
            UserError: if there is too little text, or no room for its numbers.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write()
        except BaseException as error:
            shutil.rmtree(self.folder, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            raise UserError(
                f"the text could not be read, or its numbers not be written to {self.folder}: "
                f"{error}; name another folder with data.cache"
            ) from error

    def _write(self) -> None:
        folder = self.folder
        files = shipped(folder / "reference.txt") if self.files is None else self.files
        text = TextFiles(files, **self.reading)
        vocabulary = Vocabulary.of(count(text), self.min_count, self.max_words)
        n_words = encode(text, vocabulary.number_of, folder / "numbers.int32")
        (folder / "words.txt").write_text("\n".join(vocabulary.words), encoding="utf-8")
        np.save(folder / "counts.npy", np.append(vocabulary.counts, vocabulary.total))
        rank_zero_info(
            f"{vocabulary.total:,} words of text, of them {n_words:,} in a vocabulary of "
            f"{len(vocabulary):,}"
        )

    def setup(self, stage: str | None = None) -> None:
        """Read the vocabulary that ``prepare_data`` has written."""
        words = (self.folder / "words.txt").read_text(encoding="utf-8").split("\n")
        *counts, total = np.load(self.folder / "counts.npy")
        self.vocabulary = Vocabulary(tuple(words), np.array(counts, dtype=np.int64), int(total))

    def batch_length(
        self, given: int | Literal["auto"], total: int, sizes: tuple[int, int, int]
    ) -> int:
        """Numbers of a mini-batch: as ``given``, or by how many there are in ``total``.

        Args:
            sizes: most for compiled steps, most for torch's, and least.
        """
        if given != "auto":
            return given
        assert self.trainer is not None, "Lightning gives it"
        compiled = getattr(self.trainer.lightning_module, "steps_compiled", False)
        share = total // (_PARTS * self.trainer.world_size)
        return max(sizes[2], min(share, sizes[0] if compiled else sizes[1]))

    def train_dataloader(self) -> DataLoader[tuple[int, Tensor]]:
        """Stretches of the text, in another order each epoch."""
        length = self.batch_length(self.batch_words, int(self.vocabulary.counts.sum()), SIZES)
        return EncodedText(self.folder / "numbers.int32", length).loader(self.num_workers)

    def teardown(self, stage: str | None = None) -> None:
        """Remove the numbers; processes that have mapped them keep them."""
        trainer = self.trainer
        if stage == "fit" and trainer and (trainer.is_global_zero or trainer.local_rank == 0):
            shutil.rmtree(self.folder, ignore_errors=True)
