"""A text as numbers of words, in a file that is read as if it were in memory.

Legend: N numbers: words, and an END behind every line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hybridtrain.tasks.words.vocabulary import Ints

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


class EncodedText(Dataset[tuple[int, Tensor]]):
    """Stretches of an encoded text, all of the same length but for the last.

    Args:
        path: of the file.
        length: numbers in a stretch.
    """

    def __init__(self, path: Path, length: int) -> None:
        self._path, self._length = path, length
        self._numbers: Ints = np.memmap(path, dtype=np.int32, mode="r")

    def __len__(self) -> int:
        return -(-len(self._numbers) // self._length)

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        """Which stretch, and its numbers (n,) int32."""
        if not 0 <= index < len(self):
            raise IndexError(f"stretch {index} of {len(self)}")
        start = index * self._length
        return index, torch.from_numpy(np.array(self._numbers[start : start + self._length]))

    def __getstate__(self) -> tuple[Path, int]:
        return self._path, self._length

    def __setstate__(self, state: tuple[Path, int]) -> None:
        self.__init__(*state)  # type: ignore[misc]


def only(stretches: Sequence[tuple[int, Tensor]]) -> tuple[int, Tensor]:
    """The one stretch that is a mini-batch."""
    (stretch,) = stretches
    return stretch
