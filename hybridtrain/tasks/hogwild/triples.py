"""Two numbers and a value on each line: ratings (``user item rating``), edges (``u v weight``)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hybridtrain.errors import UserError
from hybridtrain.tasks.hogwild.text_lines import Array, Columns, index, number, numbered_lines

Batch = tuple[Tensor, Tensor, Tensor]  # values (B,) fp32, ones (B,) int64, others (B,) int64
_BETWEEN = re.compile(r"::|[,;\s]+")
_BLOCK = 10_000  # lines that are in memory


@dataclass
class Triples(Dataset[Any]):
    """Values between two numbers each; ``kept`` is what holds their files."""

    values: Array
    ones: Array
    others: Array
    kept: object = None

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, place: int) -> Batch:
        return self.__getitems__([place])

    def __getitems__(self, places: Sequence[int]) -> Batch:
        """These as one mini-batch."""
        chosen = np.asarray(places)
        return (
            torch.from_numpy(self.values[chosen].astype(np.float32)),
            torch.from_numpy(self.ones[chosen].astype(np.int64)),
            torch.from_numpy(self.others[chosen].astype(np.int64)),
        )

    def part(self, places: Array) -> Triples:
        """Some of them."""
        return Triples(self.values[places], self.ones[places], self.others[places])


def read_triples(
    files: str | Sequence[str],
    names: tuple[str, str, str],
    limits: tuple[int | None, int | None] = (None, None),
) -> Triples:
    """Read them once, line by line; separated by spaces, commas or ``::``.

    Args:
        files: text, also packed with gzip; one or more.
        names: what the three columns are called, in errors.
        limits: so many rows the tables of the first two have; None: any number.

    Raises:
        UserError: naming file and line, if one makes no sense.
    """
    columns = Columns({"values": "f4", "ones": "i8", "others": "i8"})
    block: list[tuple[float, int, int]] = []
    for where, line in numbered_lines(files):
        words = [word for word in _BETWEEN.split(line) if word]
        if len(words) < 3:
            raise UserError(f"{where}: {line[:60]!r} is not {' '.join(names)}")
        one = index(words[0], where, names[0], limits[0])
        other = index(words[1], where, names[1], limits[1])
        block.append((number(words[2], where, names[2]), one, other))
        if len(block) == _BLOCK:
            _add(columns, block)
    _add(columns, block)
    return Triples(**columns.arrays(), kept=columns)


def _add(columns: Columns, block: list[tuple[float, int, int]]) -> None:
    if block:
        values, ones, others = zip(*block, strict=True)
        columns.add(values=values, ones=ones, others=others)
        block.clear()
