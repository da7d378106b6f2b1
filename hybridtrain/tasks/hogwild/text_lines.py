"""Lines of text files, one after the other, into arrays that lie in files.

Nothing but one block of lines is in memory, so a text may be larger than that. The arrays are
written once, to a directory, and mapped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from hybridtrain.errors import UserError
from hybridtrain.util.packed_files import lines

Array = np.ndarray[Any, np.dtype[Any]]
_MOST = 1 << 32  # numbers of rows are kept in 32 bits
_LARGEST = float(np.finfo(np.float32).max)


def numbered_lines(files: str | Sequence[str]) -> Iterator[tuple[str, str]]:
    """``file, line n`` and the line, of all lines that are not empty or comments.

    Raises:
        UserError: if none is named, or one cannot be read, is no text, or has nothing in it.
    """
    if not files:
        raise UserError("data.files is empty; name at least one text file")
    for name in [files] if isinstance(files, str) else files:
        found = False
        for number, line in lines(Path(name)):
            if text := line.partition("#")[0].strip():
                found = True
                yield f"{name}, line {number}", text
        if not found:
            raise UserError(f"{name} is empty; give a file with one example on each line")


class Columns:
    """Arrays that grow, each in a file of its own; gone with this object.

    Args:
        types: of each column.
    """

    def __init__(self, types: Mapping[str, Any]) -> None:
        self._room = TemporaryDirectory(prefix="hybridtrain-")
        self._types = {name: np.dtype(kind) for name, kind in types.items()}
        self._files = {name: (Path(self._room.name) / name).open("wb") for name in types}

    def add(self, **parts: Any) -> None:
        """Some more numbers of each column."""
        for name, part in parts.items():
            np.asarray(part, self._types[name]).tofile(self._files[name])

    def arrays(self) -> dict[str, Array]:
        """All that was added, mapped from the files, which are not written to any more."""
        found: dict[str, Array] = {}
        for name, file in self._files.items():
            file.close()
            path, kind = Path(file.name), self._types[name]
            empty = path.stat().st_size == 0
            found[name] = np.empty(0, kind) if empty else np.memmap(path, kind, "c")
        return found


def number(text: str, where: str, what: str) -> float:
    """Raises ``UserError`` if that is none, or not finite as float32."""
    try:
        value = float(text)
    except ValueError:
        value = np.nan
    if not abs(value) <= _LARGEST:
        raise UserError(f"{where}: {what} {text!r} is no finite number")
    return value


def index(text: str, where: str, what: str, limit: int | None = None) -> int:
    """Raises ``UserError`` if that is no whole number from 0 to below ``limit`` or 2³²."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise UserError(f"{where}: {what} {text!r} is no whole number of at least 0")
    if value >= _MOST:
        raise UserError(f"{where}: {what} {text} is above {_MOST - 1}; number them from 0")
    if limit is not None and value >= limit:
        raise UserError(
            f"{where}: {what} {value} is beyond the table, whose rows are 0 to {limit - 1}; give "
            "it more rows, or leave the line out"
        )
    return value
