"""A text as numbers of words, in a file that is read as if it were in memory.

Legend: N numbers: words, and an END behind every line.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

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
        """What training gets of these numbers, which lie in the file."""

    def __getstate__(self) -> tuple[Path, int]:
        return self._path, self._length

    def __setstate__(self, state: tuple[Path, int]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def loader(self, num_workers: int) -> DataLoader[Any]:
        """Of one stretch after the other, in another order each epoch."""
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
