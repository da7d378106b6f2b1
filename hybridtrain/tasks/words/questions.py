"""Evaluate word vectors: neighbours, analogies, and similarity as people judge it.

Legend: V words, D dimensions.
"""

from __future__ import annotations

import codecs
import gzip
import math
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridtrain.errors import UserError
from hybridtrain.util.files import text_lines, unpacked

# ---- word vectors in files: word2vec's formats, which gensim and most others read ---------------
# A first line says how many words and dimensions. Then each word, a space, and its numbers: as
# text, or as little-endian float32 (with a line feed behind, which readers skip).
#
# Legend: V words, D dimensions.

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
        first = file.readline(_WORD_BYTES).removeprefix(codecs.BOM_UTF8)
        n, dim = map(int, first.split())
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
    """Spearman's; equal values share their mean rank. NaN if all are equal, or there is one."""
    if min(len({*one}), len({*other})) < 2:
        return math.nan
    return float(np.corrcoef(_ranks(one), _ranks(other))[0, 1])


def _ranks(values: Sequence[float]) -> NDArray[np.float64]:
    _, back, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2.0)[back]


class Analogies(NamedTuple):
    """Counts of a section's questions: asked, answered rightly, and with unknown words."""

    section: str
    asked: int
    right: int
    unknown: int


class Similarity(NamedTuple):
    """A file's rank correlation (Spearman), pairs compared, and pairs without a vector."""

    correlation: float
    pairs: int
    unknown: int


class KnownWords:
    """Words and their vectors.

    Args:
        words: V.
        vectors: (V, D).
    """

    def __init__(self, words: Sequence[str], vectors: Vectors) -> None:
        self.words, self.units = list(words), unit(vectors)
        self.number_of = {word: number for number, word in enumerate(self.words)}

    @classmethod
    def of_file(cls, path: str | Path) -> KnownWords:
        """Read the file of vectors that a run has written."""
        return cls(*read_vectors(Path(path)))

    def _row(self, word: str) -> int:
        number = self._known(word)
        if number is None:
            raise UserError(f"{word!r} has no vector; there are {len(self.words):,} words")
        return number

    def _find(self, word: str) -> int:
        """As it is written, or in small letters; -1: it has no vector."""
        found = self._known(word)
        small = self._known(word.lower()) if found is None else found
        return -1 if small is None else small

    def _known(self, word: str) -> int | None:
        """As it is written, or with its letters composed or decomposed."""
        forms = (word, *(unicodedata.normalize(form, word) for form in ("NFC", "NFD")))
        return next((self.number_of[form] for form in forms if form in self.number_of), None)

    def most_similar(self, question: str, top: int = 10) -> list[tuple[str, float]]:
        """The nearest by cosine to a word, or to a sum as in ``king-man+woman``.

        Raises:
            UserError: if a word is not known.
        """
        terms = list(_terms(question, self.number_of))
        if not terms:
            raise UserError(f"{question!r} has no word in it; ask for one, or for king-man+woman")
        rows = [self._row(word) for _, word in terms]
        asked = np.asarray([sign for sign, _ in terms], dtype=np.float32) @ self.units[rows]
        alike = self.units @ (asked / max(float(np.linalg.norm(asked)), 1e-12))
        alike[rows] = -np.inf
        best = np.argsort(-alike, kind="stable")[: max(0, min(top, len(alike) - len(set(rows))))]
        return [(self.words[row], float(alike[row])) for row in best]

    def similarity(self, path: str | Path) -> Similarity:
        """Compare with people's scores in a file: ``word word score`` in each line.

        Between them are spaces, tabs, ``;`` or ``,``. The first line may name the columns; lines
        that begin with ``#`` are passed over, as are columns behind the third.

        Raises:
            UserError: if a line has no score, or there is none.
        """
        ours, theirs, unknown = [], [], 0
        for one, other, score in _scored(Path(path)):
            row, column = self._find(one), self._find(other)
            if row < 0 or column < 0:
                unknown += 1
                continue
            ours.append(float(self.units[row] @ self.units[column]))
            theirs.append(score)
        if not ours and not unknown:
            raise UserError(f"{path} has no line with two words and a score: tiger cat 7.35")
        return Similarity(rank_correlation(ours, theirs), len(ours), unknown)

    def analogies(self, path: str | Path) -> list[Analogies]:
        """Answer the questions of a file: ``a b c d`` in each line, ``: section`` above some.

        An answer is right if d is the nearest of all words but these to b − a + c.

        Raises:
            UserError: if a line has not four words, or there is none.
        """
        found: list[Analogies] = []
        section, unknown = "", 0
        rows: list[list[int]] = []
        for number, words in [*_lines(Path(path)), (0, [":"])]:
            if words[0] == ":":
                if rows or unknown:
                    right = self._right(np.array(rows, dtype=np.int64).reshape(-1, 4))
                    found.append(Analogies(section, len(rows), right, unknown))
                section, rows, unknown = " ".join(words[1:]), [], 0
                continue
            if len(words) != 4:
                raise UserError(
                    f"{path}, line {number}: {len(words)} words; an analogy has four: "
                    "man king woman queen"
                )
            numbers = list(map(self._find, words))
            if min(numbers) < 0:
                unknown += 1
            else:
                rows.append(numbers)
        if not found:
            raise UserError(f"{path} has no line with four words: man king woman queen")
        return found

    def _right(self, rows: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> int:
        right = 0
        for start in range(0, len(rows), 256):
            a, b, c, d = rows[start : start + 256].T
            alike = (self.units[b] - self.units[a] + self.units[c]) @ self.units.T
            each = np.arange(len(a))
            for asked in (a, b, c):
                alike[each, asked] = -np.inf
            right += int((alike.argmax(1) == d).sum())
        return right


def _terms(question: str, known: dict[str, int]) -> Iterator[tuple[float, str]]:
    """Signs and words of a sum; a word that has a sign in it, and a vector, is a word."""
    if question in known:
        yield 1.0, question
        return
    sign, word = 1.0, ""
    for letter in question:
        if letter in "+-":
            if word:
                yield sign, word
            sign, word = (1.0 if letter == "+" else -1.0), ""
        else:
            word += letter
    if word:
        yield sign, word


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Numbers from 1, and words; not of those that are empty or a comment."""
    for number, line in text_lines(path, "the questions"):
        if (words := line.split()) and not line.startswith("#"):
            yield number, words


def _scored(path: Path) -> Iterator[tuple[str, str, float]]:
    between: str | None = None
    n = 0  # cells of a line with a score
    lines = text_lines(path, "the scores")
    rows = [(k, line) for k, line in lines if line.strip() and not line.startswith("#")]
    for place, (number, line) in enumerate(rows):
        if place == 0:
            between = next((x for x in "\t;," if line.count(x) > 1), None)
        cells = [cell.strip(' "') for cell in line.split(between)]
        if (score := _score(cells)) is not None and len(cells) == (n or len(cells)):
            n = len(cells)
            yield cells[0], cells[1], score
        elif place > 0:
            raise UserError(
                f"{path}, line {number}: {line.strip()[:60]!r} is not two words and a score: tiger "
                "cat 7.35"
            )


def _score(cells: Sequence[str]) -> float | None:
    try:
        score = float(cells[2].replace(",", "."))
    except (IndexError, ValueError):
        return None
    return score if math.isfinite(score) else None
