"""Word vectors in files: word2vec's formats, which gensim and most others read.

A first line says how many words and dimensions. Then each word, a space, and its numbers: as text,
or as little-endian float32 (with a line feed behind, which readers skip).

Legend: V words, D dimensions.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from hybridtrain.errors import UserError
from hybridtrain.util.files import unpacked

Vectors = NDArray[np.float32]
_ROWS = 10_000  # written at once
_DIMENSIONS = 2**16  # at most
_WORD_BYTES = 2**16  # of a word, or of the first line
_NUMBER_BYTES = 64  # of a number as text
_LARGEST = float(np.finfo(np.float32).max)


def is_binary(path: Path) -> bool:
    """By its name: ``vectors.bin`` is, ``vectors.txt`` is not."""
    return path.name.removesuffix(".gz").endswith(".bin")


def write_vectors(path: Path, words: Sequence[str], vectors: Vectors) -> None:
    """Write ``vectors`` (V, D) in the format that the name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    binary = is_binary(path)
    with gzip.open(path, "wb") if path.suffix == ".gz" else path.open("wb") as file:
        file.write(f"{len(words)} {vectors.shape[1]}\n".encode())
        for start in range(0, len(words), _ROWS):
            rows = np.ascontiguousarray(vectors[start : start + _ROWS], dtype="<f4")
            for word, row in zip(words[start : start + _ROWS], rows, strict=True):
                numbers = row.tobytes() if binary else " ".join(map(str, row)).encode()
                file.write(word.encode("utf-8", "replace") + b" " + numbers + b"\n")


def read_vectors(path: Path) -> tuple[list[str], Vectors]:
    """Words and their vectors (V, D).

    Raises:
        UserError: if the file is missing, or is not in one of the formats.
    """
    with unpacked(path) as file:
        return _read(path, file)


def _read(path: Path, file: BinaryIO) -> tuple[list[str], Vectors]:
    try:
        n, dim = map(int, file.readline(_WORD_BYTES).split())
        words, vectors = [], np.empty((n, dim), dtype=np.float32)
    except (ValueError, MemoryError):
        n = dim = 0
    if n < 1 or not 1 <= dim <= _DIMENSIONS:
        raise UserError(
            f"{path} does not begin with the number of words and dimensions (1 to "
            f"{_DIMENSIONS:,}); give a file in word2vec's text or binary format"
        )
    read = _binary if is_binary(path) else _text
    for row in range(n):
        word, numbers = read(file, dim)
        if not word or len(numbers) != dim or not (np.abs(numbers) <= _LARGEST).all():
            raise UserError(f"{path} ends or is damaged at word {row + 1} of {n}; write it again")
        words.append(word)
        vectors[row] = numbers
    if file.read(_WORD_BYTES).strip():
        raise UserError(f"{path} goes on behind its {n} words; write it again")
    return words, vectors


def _text(file: BinaryIO, dim: int) -> tuple[str, Any]:
    line = file.readline(_WORD_BYTES + _NUMBER_BYTES * dim)
    word, _, rest = line.rstrip(b"\n").partition(b" ")
    try:
        return word.decode("utf-8", "replace"), [float(each) for each in rest.split()]
    except ValueError:
        return "", []


def _binary(file: BinaryIO, dim: int) -> tuple[str, Any]:
    letters = bytearray()
    while (letter := file.read(1)) not in (b" ", b"") and len(letters) < _WORD_BYTES:
        if letter != b"\n":
            letters += letter
    found = file.read(4 * dim)
    numbers = np.frombuffer(found[: len(found) // 4 * 4], dtype="<f4")
    return letters.decode("utf-8", "replace"), numbers


def unit(vectors: Vectors) -> Vectors:
    """Each of length 1; what has none stays 0."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's; equal values share their mean rank. NaN if there are fewer than two."""
    if len(one) < 2:
        return math.nan
    return float(np.corrcoef(_ranks(one), _ranks(other))[0, 1])


def _ranks(values: Sequence[float]) -> NDArray[np.float64]:
    _, back, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2.0)[back]
