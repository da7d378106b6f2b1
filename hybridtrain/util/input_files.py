"""Open files that a user names, after checks of their kind and size.

A path may lead to a FIFO, which blocks the process that opens it; to a device, which never ends;
or to a file larger than memory. All readers open their files here, or call :func:`check_input`
before a library opens one by name.
"""

from __future__ import annotations

import gzip
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, cast

from hybridtrain.errors import UserError

TEXT_BYTES = 2**30  # of a text that is read as a whole


def open_input(path: str | Path, what: str, most_bytes: int | None = None) -> BufferedReader:
    """Open a regular file to read its bytes. Opening never waits.

    Args:
        path: as the user has given it.
        what: its name in messages: ``the alphabet file``.
        most_bytes: limit of its size.

    Raises:
        UserError: if it cannot be opened, is no regular file, or is too large.
    """
    try:
        fd = os.open(Path(path).expanduser(), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError, RuntimeError) as error:  # zero bytes; the home of a stranger
        raise _refused(path, what, reason_of(error)) from error
    found = os.fstat(fd)
    fault = None
    if not stat.S_ISREG(found.st_mode):
        fault = "it is a directory, a FIFO or a device, and no regular file"
    elif most_bytes is not None and found.st_size > most_bytes:
        fault = f"it has {found.st_size:,} bytes, and at most {most_bytes:,} are read"
    if fault is not None:
        os.close(fd)
        raise _refused(path, what, fault)
    return open(fd, "rb")  # noqa: PTH123  (a descriptor)


def check_input(path: str | Path, what: str, most_bytes: int | None = None) -> None:
    """Check as :func:`open_input` does, before a library opens the file by name."""
    open_input(path, what, most_bytes).close()


def read_text(path: str | Path, what: str, encoding: str = "utf-8", errors: str = "strict") -> str:
    """The whole text of a file; ``errors`` as ``bytes.decode`` has it.

    Raises:
        UserError: as :func:`open_input`, and if the file is no text.
    """
    with open_input(path, what, TEXT_BYTES) as file:
        try:
            return file.read().decode(encoding, errors)
        except (OSError, UnicodeDecodeError) as error:
            raise _refused(path, what, reason_of(error)) from error


def reason_of(error: Exception) -> str:
    """Why a file could not be read, in a few words."""
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _refused(path: str | Path, what: str, reason: str) -> UserError:
    return UserError(f"cannot read {what} {path}: {reason}")


# ---- packed with gzip, which the first bytes say -------------------------------------------------

_GZIP = b"\x1f\x8b"
_LINE_BYTES = 2**25  # of one line


@contextmanager
def unpacked(path: Path) -> Iterator[BinaryIO]:
    """Open a file, decompressing it if it is gzip.

    Raises:
        UserError: if it cannot be read, or is damaged; also while it is read.
    """
    with open_input(path, "the file") as raw, _reading(path):
        packed = raw.read(len(_GZIP)) == _GZIP
        raw.seek(0)
        yield cast(BinaryIO, gzip.GzipFile(fileobj=raw) if packed else raw)


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number (from 1) and text of each line; the length of a line is limited.

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
