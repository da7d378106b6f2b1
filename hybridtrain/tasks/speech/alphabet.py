"""The symbols a speech model writes: text to CTC labels and back.

Unicode writes a letter with a mark as one character (composed, NFC: "ü" is U+00FC) or as a letter
and a mark (decomposed, NFD: U+0075 U+0308). Alphabet, transcripts and word lists may differ in
that: :meth:`Alphabet.encode` looks for either form.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hybridtrain.errors import UserError
from hybridtrain.util.files import text_lines

ENGLISH = " abcdefghijklmnopqrstuvwxyz'"  # 28 symbols, the order of DeepSpeech's alphabet.txt
_LONGEST = 4  # characters of one that is decomposed
_APOSTROPHES = dict.fromkeys("\u2018\u2019\u02bc\u00b4`", "'")


@dataclass(frozen=True)
class Alphabet:
    """An ordered set of single characters; character i is label i, CTC's blank comes last.

    ``symbols`` is a string of distinct characters (default: space, a to z, apostrophe).
    A string of decomposed letters is composed. Raises ``UserError`` if it is empty or a character
    occurs twice.
    """

    symbols: str = ENGLISH

    def __post_init__(self) -> None:
        if not self.symbols:
            raise UserError("the alphabet is empty: give at least one character")
        if len(set(self.symbols)) < len(self.symbols):
            object.__setattr__(self, "symbols", unicodedata.normalize("NFC", self.symbols))
        twice = sorted({symbol for symbol in self.symbols if self.symbols.count(symbol) > 1})
        if twice:
            raise UserError(
                f"the alphabet contains {named(twice[0])} twice: list every character once"
            )

    @cached_property
    def _label(self) -> dict[str, int]:
        return {symbol: label for label, symbol in enumerate(self.symbols)}

    @cached_property
    def _decomposed(self) -> dict[str, int]:
        """The labels by the decomposed symbols."""
        return {unicodedata.normalize("NFD", x): label for x, label in self._label.items()}

    @classmethod
    def from_file(cls, path: str | Path) -> Alphabet:
        """Read DeepSpeech's ``alphabet.txt``.

        One character per line, the line number is the label; lines that start with ``#`` are
        comments, ``\\#`` is the character ``#`` itself.
        """
        lines = [(n, x) for n, x in text_lines(path, "the alphabet file") if not x.startswith("#")]
        return cls("".join(_symbol(f"{path}, line {n}", line) for n, line in lines))

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
        if (labels := self._labels(text)) is not None:
            return labels
        characters = unicodedata.normalize("NFC", text)
        first = next((x for x in characters if self._labels(x) is None), characters[0])
        alike = unicodedata.normalize("NFKC", _APOSTROPHES.get(first, first)).lower()
        hint = f" (it has {alike!r})" if alike in self._label else ""
        raise UserError(
            f"the character {named(first)} in {text!r} is not in the alphabet {self.symbols!r}"
            f"{hint}: correct the transcript, or set data.alphabet"
        )

    def has(self, text: str) -> bool:
        """Whether the text can be written with these symbols."""
        return self._labels(text) is not None

    def _labels(self, text: str) -> list[int] | None:
        """Labels of the text composed, as it is, or of the longest symbols found in it."""
        for form in (unicodedata.normalize("NFC", text), text):
            labels = [self._label.get(symbol, -1) for symbol in form]
            if -1 not in labels:
                return labels
        return self._longest(unicodedata.normalize("NFD", text))

    def _longest(self, text: str) -> list[int] | None:
        """``text``: decomposed."""
        labels, start = [], 0
        while start < len(text):
            ends = range(min(len(text), start + _LONGEST), start, -1)
            end = next((end for end in ends if text[start:end] in self._decomposed), None)
            if end is None:
                return None
            labels.append(self._decomposed[text[start:end]])
            start = end
        return labels

    def decode(self, labels: Iterable[int]) -> str:
        """Text of ``labels`` (symbol labels only: collapse repeats and blanks before)."""
        return "".join(self.symbols[label] for label in labels)

    def __len__(self) -> int:
        return len(self.symbols)


def named(character: str) -> str:
    """The character as messages show it: with its code point unless it is printable ASCII."""
    if character.isascii() and character.isprintable():
        return repr(character)
    point = f"U+{ord(character):04X} {unicodedata.name(character, '')}".strip()
    return f"{character!r} ({point})"


def _symbol(where: str, line: str) -> str:
    """The character on a line of an alphabet file."""
    symbol = (
        "#" if line == "\\#" else line if len(line) == 1 else unicodedata.normalize("NFC", line)
    )
    if len(symbol) == 1:
        return symbol
    said = "one character per line, '#' begins a comment"
    if any(map(unicodedata.combining, symbol[1:])):
        said = "there is none for this letter and its marks together; give each a line of its own"
    points = " ".join(f"U+{ord(x):04X}" for x in symbol)
    shown = f"{symbol!r}" if symbol.isascii() else f"{symbol!r} ({points})"
    raise UserError(f"{where}: {shown} is not one character ({said})")
