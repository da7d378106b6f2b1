"""The symbols a speech model writes: text to CTC labels and back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hybridtrain.errors import UserError
from hybridtrain.util.files import read_text

ENGLISH = " abcdefghijklmnopqrstuvwxyz'"  # 28 symbols, the order of DeepSpeech's alphabet.txt


@dataclass(frozen=True)
class Alphabet:
    """An ordered set of single characters; character i is label i, CTC's blank comes last.

    ``symbols`` is a string of distinct characters (default: space, a to z, apostrophe).
    Raises ``UserError`` if it is empty or a character occurs twice.
    """

    symbols: str = ENGLISH

    def __post_init__(self) -> None:
        if not self.symbols:
            raise UserError("the alphabet is empty: give at least one character")
        twice = sorted({symbol for symbol in self.symbols if self.symbols.count(symbol) > 1})
        if twice:
            raise UserError(f"the alphabet contains {twice[0]!r} twice: list every character once")

    @cached_property
    def _label(self) -> dict[str, int]:
        return {symbol: label for label, symbol in enumerate(self.symbols)}

    @classmethod
    def from_file(cls, path: str | Path) -> Alphabet:
        """Read DeepSpeech's ``alphabet.txt``.

        One character per line, the line number is the label; lines that start with ``#`` are
        comments, ``\\#`` is the character ``#`` itself.
        """
        lines = enumerate(read_text(path, "the alphabet file", "utf-8-sig").splitlines(), start=1)
        found = {n: "#" if x == "\\#" else x for n, x in lines if not x.startswith("#")}
        for number, symbol in found.items():
            if len(symbol) != 1:
                raise UserError(
                    f"{path}, line {number}: {symbol!r} is not one character"
                    " (one character per line, '#' begins a comment)"
                )
        return cls("".join(found.values()))

    @classmethod
    def of(cls, alphabet: Alphabet | str | None) -> Alphabet:
        """An alphabet from whatever a configuration may hold.

        ``None`` is English, a string that ends in ``.txt`` is a file as DeepSpeech's
        ``alphabet.txt``, any other string is the characters themselves.
        """
        if isinstance(alphabet, Alphabet):
            return alphabet
        if alphabet is None:
            return cls()
        if alphabet.endswith(".txt"):
            return cls.from_file(alphabet)
        return cls(alphabet)

    @property
    def blank(self) -> int:
        """The label of CTC's blank: the one after the last symbol."""
        return len(self.symbols)

    def encode(self, text: str) -> list[int]:
        """Labels of ``text``; ``UserError`` names the first character outside the alphabet."""
        try:
            return [self._label[symbol] for symbol in text]
        except KeyError as error:
            raise UserError(
                f"the character {error.args[0]!r} in {text!r} is not in the alphabet"
                f" {self.symbols!r}: correct the transcript, or set data.alphabet"
            ) from None

    def decode(self, labels: Iterable[int]) -> str:
        """Text of ``labels`` (symbol labels only: collapse repeats and blanks before)."""
        return "".join(self.symbols[label] for label in labels)

    def __len__(self) -> int:
        return len(self.symbols)
