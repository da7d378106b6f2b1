"""Words out of text files, line by line, whatever their size."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal

from hybridtrain.errors import UserError
from hybridtrain.util.input_files import check_input
from hybridtrain.util.option_types import typed
from hybridtrain.util.packed_files import unpacked

LONGEST = 1 << 20  # bytes of a line that are looked at together
LONGEST_WORD = 1 << 24
_WORD = re.compile(r"\w+(?:['’]\w+)*")
Tokens = Literal["words", "spaces"]
Errors = Literal["strict", "replace", "ignore"]


class TextFiles:
    """Some files, read in their order.

    Args:
        files: paths; what is compressed with gzip is known by its first bytes.
        tokens: ``words``: runs of letters and digits; ``spaces``: whatever lies between spaces.
        lower: make all letters small.
        errors: what to do with bytes that are no UTF-8: ``strict`` raises, ``replace`` puts U+FFFD
            there, ``ignore`` leaves them out.

    Raises:
        UserError: if a file is missing, or an option is none of those.
    """

    @typed("data.")
    def __init__(
        self,
        files: Sequence[str | Path],
        tokens: Tokens = "words",
        lower: bool = True,
        errors: Errors = "strict",
    ) -> None:
        self.files = [Path(file) for file in files]
        if not self.files:
            raise UserError("data.files is empty; name at least one text file")
        for file in self.files:
            check_input(file, "data.files:")
        self._split = _WORD.findall if tokens == "words" else str.split
        self._lower, self._errors = lower, errors

    def __iter__(self) -> Iterator[tuple[list[str], bool]]:
        """Words that follow one another, and whether their line ends behind them."""
        for file in self.files:
            yield from self._of(file)

    def _of(self, path: Path) -> Iterator[tuple[list[str], bool]]:
        with unpacked(path) as file:
            for number, block, ends in blocks(path, file):
                yield self._words(path, number, block), ends

    def _words(self, path: Path, number: int, block: bytes) -> list[str]:
        try:
            text = block.decode("utf-8", self._errors)
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path}, line {number}: byte {block[error.start]:#04x} is no UTF-8; convert the "
                "file, or give data.encoding_errors=replace or ignore"
            ) from None
        return self._split(text.lower() if self._lower else text)


def blocks(path: Path, file: BinaryIO) -> Iterator[tuple[int, bytes, bool]]:
    """Number of the line, bytes of it that are cut at a space, whether it ends there."""
    number, left = 1, b""
    while line := file.readline(LONGEST):
        line, ends = left + line, line.endswith(b"\n")
        left = b""
        if not ends and (cut := max(line.rfind(b" "), line.rfind(b"\t"))) >= 0:
            line, left = line[:cut], line[cut:]
        elif not ends:  # within a word; or the file's last
            left = line
            if len(left) > LONGEST_WORD:
                raise UserError(
                    f"{path}, line {number}: {len(left):,} bytes without a space are no text"
                )
            continue
        yield number, line, ends
        number += ends
    if left:
        yield number, left, True
