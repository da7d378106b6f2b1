"""Evaluate word vectors: neighbours, analogies, and similarity as people judge it.

Legend: V words, D dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hybridtrain.errors import UserError
from hybridtrain.tasks.words.vector_files import Vectors, rank_correlation, read_vectors, unit
from hybridtrain.util.files import read_text


class Analogies(NamedTuple):
    """Of one section of a file: questions asked, answered rightly, and with unknown words."""

    section: str
    asked: int
    right: int
    unknown: int


class Similarity(NamedTuple):
    """Of one file: Spearman's rank correlation, pairs compared, and pairs without a vector."""

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
        number = self.number_of.get(word)
        if number is None:
            raise UserError(f"{word!r} has no vector; there are {len(self.words):,} words")
        return number

    def _find(self, word: str) -> int:
        """As it is written, or in small letters; -1: it has no vector."""
        return self.number_of.get(word, self.number_of.get(word.lower(), -1))

    def most_similar(self, question: str, top: int = 10) -> list[tuple[str, float]]:
        """The nearest by cosine to a word, or to a sum as in ``king-man+woman``.

        Raises:
            UserError: if a word is not known.
        """
        rows, signs = [], []
        for sign, word in _terms(question, self.number_of):
            rows.append(self._row(word))
            signs.append(sign)
        if not rows:
            raise UserError(f"{question!r} has no word in it; ask for one, or for king-man+woman")
        asked = np.asarray(signs, dtype=np.float32) @ self.units[rows]
        alike = self.units @ (asked / max(float(np.linalg.norm(asked)), 1e-12))
        alike[rows] = -np.inf
        best = np.argsort(-alike, kind="stable")[: max(0, min(top, len(alike) - len(set(rows))))]
        return [(self.words[row], float(alike[row])) for row in best]

    def similarity(self, path: str | Path) -> Similarity:
        """Compare with people's scores in a file: ``word word score`` in each line.

        Lines whose third field is no number are passed over, as are those that begin with ``#``.

        Raises:
            UserError: if no line has a score.
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
    for number, line in enumerate(read_text(path, "the questions").splitlines(), 1):
        if (words := line.split()) and not line.startswith("#"):
            yield number, words


def _scored(path: Path) -> Iterator[tuple[str, str, float]]:
    for _, words in _lines(path):
        with suppress(IndexError, ValueError):
            if math.isfinite(score := float(words[2].replace(",", "."))):
                yield words[0], words[1], score
