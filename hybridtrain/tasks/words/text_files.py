"""Text files of any size: words, line by line, and their numbers in a file that is mapped.

Legend: N numbers: words, and an END behind every line.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hybridtrain.errors import UserError
from hybridtrain.tasks.words.vocabulary import Ints
from hybridtrain.util.input_files import check_input, unpacked
from hybridtrain.util.option_types import typed

LONGEST = 1 << 20  # bytes of a line that are looked at together
LONGEST_WORD = 1 << 24
_WORD = re.compile(r"\w+(?:['’]\w+)*")
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
        self._split = _WORD.findall if tokens == "words" else str.split
        self._lower, self._errors = lower, errors

    def __iter__(self) -> Iterator[tuple[list[str], bool]]:
        """Words that follow one another, and whether their line ends behind them."""
        for file in self.files:
            yield from self._of(file)

    def _of(self, path: Path) -> Iterator[tuple[list[str], bool]]:
        with unpacked(path) as file:
            for number, block, ends in blocks(path, file):
                yield self._words(path, number, block), ends

    def _words(self, path: Path, number: int, block: bytes) -> list[str]:
        try:
            text = block.decode("utf-8", self._errors)
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path}, line {number}: byte {block[error.start]:#04x} is no UTF-8; convert the "
                "file, or give data.encoding_errors=replace or ignore"
            ) from None
        return self._split(text.lower() if self._lower else text)


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
