"""Examples with a label and a few of many features: libsvm's and vowpal wabbit's text.

``1 3:0.5 17:1.25`` and ``1 |f 3:0.5 17:1.25``; labels are −1 (or 0) and 1.

Legend: N examples, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hybridtrain.errors import UserError
from hybridtrain.tasks.hogwild.text_lines import Array, Columns, index, number, numbered_lines

# labels (B,) fp32 of -1 and 1; starts (B + 1,) int64; features (nnz,) int64; values (nnz,) fp32
Rows = tuple[Tensor, Tensor, Tensor, Tensor]
_LABELS = {-1.0: -1.0, 0.0: -1.0, 1.0: 1.0}


@dataclass
class Examples(Dataset[Any]):
    """Examples in compressed rows; ``kept`` is what holds their files."""

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
        """A mini-batch says which examples are in it: a compiled step reads them where they lie."""
        return torch.tensor(places)

    def rows(self, places: Tensor) -> Rows:
        """These examples (B,), one behind the other."""
        chosen = places.numpy()
        firsts, lasts = self.starts[chosen], self.starts[chosen + 1]
        starts = np.concatenate([[0], np.cumsum(lasts - firsts)])
        where = np.repeat(firsts - starts[:-1], lasts - firsts) + np.arange(starts[-1])
        return (
            torch.from_numpy(self.labels[chosen]),
            torch.from_numpy(starts),
            torch.from_numpy(self.features[where].astype(np.int64)),
            torch.from_numpy(self.values[where]),
        )

    def degrees(self) -> Tensor:
        """In how many examples each feature is, (F,); 1 for one that is in none."""
        counts = np.bincount(self.features, minlength=self.n_features)
        return torch.from_numpy(np.maximum(counts, 1))


def as_it_is(batch: Any) -> Any:
    """For a loader: what the examples give is a mini-batch already."""
    return batch


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
    for where, line in numbered_lines(files):
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
