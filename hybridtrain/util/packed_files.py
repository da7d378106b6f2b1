"""Files that may be packed with gzip, which their first bytes say, and their lines."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from hybridtrain.errors import UserError
from hybridtrain.util.input_files import open_input

_GZIP = b"\x1f\x8b"
_LINE_BYTES = 2**25  # of one line


@contextmanager
def unpacked(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, as they were before it was packed.

    Raises:
        UserError: if it cannot be read, or is damaged; also while it is read.
    """
    with open_input(path, "the file") as raw, _reading(path):
        packed = raw.read(len(_GZIP)) == _GZIP
        raw.seek(0)
        yield cast(BinaryIO, gzip.GzipFile(fileobj=raw) if packed else raw)


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbers from 1, and the lines of a text; none is longer than memory allows.

    Raises:
        UserError: also if it is no text.
    """
    with unpacked(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(_LINE_BYTES), b""), 1):
            if len(line) == _LINE_BYTES:
                raise UserError(f"{path}, line {number} has more than {_LINE_BYTES:,} bytes")
            try:
                yield number, line.decode()
            except UnicodeDecodeError as error:
                raise UserError(f"{path}, line {number} cannot be read: {error}") from error


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path} is damaged: {error}; pack it again with gzip") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
