"""Files that may be packed with gzip, which their first bytes say."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from hybridtrain.errors import UserError

_GZIP = b"\x1f\x8b"


@contextmanager
def unpacked(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, as they were before it was packed.

    Raises:
        UserError: if it cannot be read, or is damaged; also while it is read.
    """
    try:
        with path.open("rb") as raw:
            packed = raw.read(len(_GZIP)) == _GZIP
        with gzip.open(path) if packed else path.open("rb") as file:
            yield cast(BinaryIO, file)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path} is damaged: {error}; pack it again with gzip") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
