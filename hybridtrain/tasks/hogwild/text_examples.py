"""Examples of the three problems from text files, into arrays that lie in files.

A line has two numbers and a value (``user item rating``, ``u v weight``), or a label (−1 or 0, and
1) and a few of many features, in libsvm's text, ``1 3:0.5 17:1.25``, or vowpal wabbit's,
``1 |f 3:0.5 17:1.25``. Only one block of lines is in memory, so a text may be larger than memory.
The arrays are written once, to a directory, and mapped.

Legend: N examples, F features, B examples of a mini-batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hybridtrain.errors import UserError
from hybridtrain.util.files import lines
from hybridtrain.util.tables import whole_number

Array = np.ndarray[Any, np.dtype[Any]]
_MOST = 1 << 32  # numbers of rows are kept in 32 bits
_LARGEST = float(np.finfo(np.float32).max)


def numbered_lines(file: str) -> Iterator[tuple[str, str]]:
    """``file, line n`` and the line, of all lines that are not empty or comments.

    Raises:
        UserError: if it cannot be read, is no text, or has nothing in it.
    """
    found = False
    for number, line in lines(Path(file)):
        if text := line.partition("#")[0].strip():
            found = True
            yield f"{file}, line {number}", text
    if not found:
        raise UserError(f"{file} is empty; give a file with one example on each line")


def named(files: str | Sequence[str]) -> Sequence[str]:
    """One file or several, as a list; raises ``UserError`` if there is none."""
    if not files:
        raise UserError("data.files is empty; name at least one text file")
    return [files] if isinstance(files, str) else files


class Columns:
    """Arrays that grow in temporary files, which are removed with this object.

    Args:
        types: of each column.
    """

    def __init__(self, types: Mapping[str, Any]) -> None:
        self._room = TemporaryDirectory(prefix="hybridtrain-")
        self._types = {name: np.dtype(kind) for name, kind in types.items()}
        self._files = {name: (Path(self._room.name) / name).open("wb") for name in types}

    def add(self, **parts: Any) -> None:
        """Append numbers to each column."""
        for name, part in parts.items():
            np.asarray(part, self._types[name]).tofile(self._files[name])

    def arrays(self) -> dict[str, Array]:
        """Close the files and map them."""
        found: dict[str, Array] = {}
        for name, file in self._files.items():
            file.close()
            path, kind = Path(file.name), self._types[name]
            empty = path.stat().st_size == 0
            found[name] = np.empty(0, kind) if empty else np.memmap(path, kind, "c")
        return found


def number(text: str, where: str, what: str) -> float:
    """Parse a finite float32; raises ``UserError``."""
    try:
        value = float(text.replace("_", "?"))  # 1_0 is a number in Python only
    except ValueError:
        value = np.nan
    if not abs(value) <= _LARGEST:
        raise UserError(f"{where}: {what} {text!r} is no finite number")
    return value


def index(text: str, where: str, what: str, limit: int | None = None) -> int:
    """Parse a whole number from 0 to below ``limit`` or 2³²; raises ``UserError``."""
    value = whole_number(text)
    if value is None or value < 0:
        raise UserError(f"{where}: {what} {text!r} is no whole number of at least 0")
    if value >= _MOST:
        raise UserError(f"{where}: {what} {text} is above {_MOST - 1}; number them from 0")
    if limit is not None and value >= limit:
        raise UserError(
            f"{where}: {what} {value} is beyond the table, whose rows are 0 to {limit - 1}; give "
            "it more rows, or leave the line out"
        )
    return value


# ---- two numbers and a value ---------------------------------------------------------------------

Batch = tuple[Tensor, Tensor, Tensor]  # values (B,) fp32, ones (B,) int64, others (B,) int64
_BETWEEN = ("::", "\t", ";", ",", None)  # None: spaces
_NAME = re.compile(r"[^\W\d]\w*")
_BLOCK = 10_000  # lines that are in memory


@dataclass
class Triples(Dataset[Any]):
    """A value for each pair of numbers; ``kept`` keeps their files."""

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
    """Read them once, line by line; separated by spaces, tabs, commas, ``;`` or ``::``.

    A file may begin with a line of column names; columns behind the third are ignored.

    Args:
        files: text, also packed with gzip; one or more.
        names: of the three columns, in errors.
        limits: rows of the tables of the first two; None: any number.

    Raises:
        UserError: naming file and line, if one makes no sense.
    """
    columns = Columns({"values": "f4", "ones": "i8", "others": "i8"})
    block: list[tuple[float, int, int]] = []
    rows = chain.from_iterable(_rows(file, names) for file in named(files))
    for where, words in rows:
        one = index(words[0], where, names[0], limits[0])
        other = index(words[1], where, names[1], limits[1])
        block.append((number(words[2], where, names[2]), one, other))
        if len(block) == _BLOCK:
            _add(columns, block)
    _add(columns, block)
    made = columns.arrays()
    if not len(made["values"]):
        raise UserError(f"{', '.join(named(files))}: only names of columns; give {' '.join(names)}")
    return Triples(**made, kept=columns)


def _rows(file: str, names: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Place and cells of each row of a file; all have as many as its first line."""
    between: str | None = None
    n = 0  # cells of a line
    for where, line in numbered_lines(file):
        begins = n == 0
        if begins:
            between = next(x for x in _BETWEEN if x is None or len(line.split(x)) >= len(names))
        cells = [cell.strip(' "') for cell in line.split(between)]
        while len(cells) > (n or len(names)) and not cells[-1]:
            cells.pop()
        n = n or len(cells)
        if len(cells) < len(names):
            raise UserError(f"{where}: {line[:60]!r} is not {' '.join(names)}")
        if len(cells) != n:
            raise UserError(
                f"{where}: {line[:60]!r} has {len(cells)} numbers, and the first line has {n}; "
                "write a decimal point, and the same columns in all lines"
            )
        if begins and all(map(_NAME.fullmatch, cells)):
            _check_order(where, [cell.lower() for cell in cells], names)
        else:
            yield where, cells


def _check_order(where: str, header: Sequence[str], names: Sequence[str]) -> None:
    for place, name in enumerate(names):
        if len(name) > 1 and name not in header[place] and any(name in each for each in header):
            raise UserError(
                f"{where}: the columns are {' '.join(header)}, but {' '.join(names)} are read in "
                "this order; change their order in the file"
            )


def _add(columns: Columns, block: list[tuple[float, int, int]]) -> None:
    if block:
        values, ones, others = zip(*block, strict=True)
        columns.add(values=values, ones=ones, others=others)
        block.clear()


# ---- a label and features ------------------------------------------------------------------------

# labels (B,) fp32 of -1 and 1; starts (B + 1,) int64; features (nnz,) int64; values (nnz,) fp32
Rows = tuple[Tensor, Tensor, Tensor, Tensor]
_LABELS = {-1.0: -1.0, 0.0: -1.0, 1.0: 1.0}


@dataclass
class Examples(Dataset[Any]):
    """Examples in compressed sparse rows; ``kept`` keeps their files."""

    labels: Array  # (N,)
    starts: Array  # (N + 1,)
    features: Array  # unsigned, as a compiled step need not ask whether they are below 0
    values: Array
    n_features: int
    kept: object = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, place: int) -> Tensor:
        return self.__getitems__([place])

    def __getitems__(self, places: Sequence[int]) -> Tensor:
        """The numbers of the examples: compiled steps read the examples in place."""
        return torch.tensor(places)

    def rows(self, places: Tensor) -> Rows:
        """These examples (B,), one behind the other."""
        chosen = places.cpu().numpy()
        firsts, lasts = self.starts[chosen], self.starts[chosen + 1]
        starts = np.concatenate([[0], np.cumsum(lasts - firsts)])
        where = np.repeat(firsts - starts[:-1], lasts - firsts) + np.arange(starts[-1])
        features = self.features[where].astype(np.int64)
        found = self.labels[chosen], starts, features, self.values[where]
        labels, begins, numbers, values = (torch.from_numpy(x).to(places.device) for x in found)
        return labels, begins, numbers, values

    def degrees(self) -> Tensor:
        """In how many examples each feature is, (F,); 1 for one that is in none."""
        counts = np.bincount(self.features, minlength=self.n_features)
        return torch.from_numpy(np.maximum(counts, 1))


def _as_it_is(batch: Any) -> Any:
    """``collate_fn`` for data sets whose ``__getitems__`` returns a mini-batch."""
    return batch


class InPlaceData(pl.LightningDataModule):
    """Loaders of two data sets whose ``__getitems__`` returns a mini-batch.

    ``trained``: what is trained on, ``validated``: what is validated on; ``batch_size``: of each
    worker in training.
    """

    kind = ""  # the name that modules ask for
    trained: Dataset[Any]
    validated: Dataset[Any]
    batch_size: int

    def train_dataloader(self) -> DataLoader[Any]:
        """In another order each epoch."""
        return DataLoader(self.trained, self.batch_size, shuffle=True, collate_fn=_as_it_is)

    def val_dataloader(self) -> DataLoader[Any]:
        """In large mini-batches."""
        return self.large_batches(self.validated)

    def large_batches(self, examples: Dataset[Any]) -> DataLoader[Any]:
        """A loader for evaluation."""
        return DataLoader(examples, 5000, collate_fn=_as_it_is)


def read_examples(files: str | Sequence[str], n_features: int | None = None) -> Examples:
    """Read them once, line by line.

    Args:
        files: libsvm or vowpal wabbit text, also packed with gzip; one or more.
        n_features: F; None: one more than the largest index.

    Raises:
        UserError: naming file and line, if one makes no sense.
    """
    columns = Columns({"labels": "f4", "lengths": "i8", "features": "u4", "values": "f4"})
    largest = -1
    for where, line in chain.from_iterable(map(numbered_lines, named(files))):
        label, features, values = parse_example(line, where, n_features)
        columns.add(labels=[label], lengths=[len(features)], features=features, values=values)
        largest = max(largest, max(features, default=-1))
    made = columns.arrays()
    starts = np.concatenate([[0], np.cumsum(made["lengths"])])
    n = largest + 1 if n_features is None else n_features
    return Examples(made["labels"], starts, made["features"], made["values"], n, columns)


def parse_example(
    line: str, where: str, n_features: int | None = None
) -> tuple[float, list[int], list[float]]:
    """Label, features and their values.

    Raises:
        UserError: beginning with ``where``, if that is no example.
    """
    head, bar, rest = line.partition("|")
    if bar:  # vowpal wabbit: the namespace, if it has a name, is not needed
        rest = rest if rest[:1].isspace() else rest.partition(" ")[2]
        given, words = head.split()[:1], rest.split()
    else:
        given, words = line.split()[:1], line.split()[1:]
    label = _LABELS.get(number(given[0], where, "label") if given else np.nan)
    if label is None:
        raise UserError(f"{where}: label {' '.join(given)!r} is none of -1, 0 and 1")
    features, values = [], []
    for word in words:
        name, colon, value = word.partition(":")
        if not colon and not bar:
            raise UserError(f"{where}: {word!r} is no feature; write it as index:value")
        features.append(index(name, where, "feature", n_features))
        values.append(number(value, where, f"value of feature {name}") if colon else 1.0)
    if len(set(features)) < len(features):
        raise UserError(f"{where}: a feature is given twice")
    return label, features, values


def planted_examples(n: int, n_features: int, seed: int) -> Examples:
    """Ten features each, common ones more often; a hidden plane tells the label, but for 5 %."""
    random = np.random.default_rng(seed)
    features = (random.random((n, 10)) ** 2 * n_features).astype(np.uint32)
    features.sort(axis=1)
    features += np.arange(10, dtype=np.uint32)  # none occurs twice in an example
    values = random.random((n, 10), dtype=np.float32) + 0.1
    values /= np.linalg.norm(values, axis=1, keepdims=True)
    plane = random.standard_normal(n_features + 10)
    labels = np.sign((plane[features] * values).sum(axis=1))
    labels = np.where(random.random(n) < 0.05, -labels, labels).astype(np.float32)
    starts = np.arange(0, 10 * n + 1, 10)
    return Examples(labels, starts, features.ravel(), values.ravel(), n_features + 10)
