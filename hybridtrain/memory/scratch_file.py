"""A nameless file that another process of this host fills and this one reads without copying."""

from __future__ import annotations

import io
import os
import weakref
from pathlib import Path
from typing import Any

import torch

from hybridtrain.util.anonymous_files import anonymous_descriptor

_OF_PROCESSES = Path("/proc/self/fd")


class Scratch:
    """Takes what would be too much for a message. It is gone when all that was read from it is.

    ``path`` is what the other process opens; empty where the system has no such paths.
    """

    def __init__(self) -> None:
        self._fd = anonymous_descriptor() if _OF_PROCESSES.is_dir() else -1
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}" if self._fd >= 0 else ""
        self._closed = weakref.finalize(self, os.close, self._fd) if self._fd >= 0 else None

    def load(self) -> Any:
        """What the other process has put there, by :func:`fill`; tensors are views of the file."""
        return read(self.path)

    def close(self) -> None:
        """It will not be read again; what was read stays."""
        if self._closed is not None:
            self._closed()


def fill(path: str, content: Any) -> bytes:
    """Put it into somebody's scratch file; what could not be put there comes back as bytes."""
    if path:
        try:
            with Path(path).open("wb") as file:
                torch.save(content, file)
            return b""
        except (OSError, RuntimeError):  # of the memory, or of who has asked, there is no more
            pass
    return as_bytes(content)


def as_bytes(content: Any) -> bytes:
    """What ``torch.save`` makes of it."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def read(path: str, rest: bytes = b"") -> Any:
    """What :func:`fill` has put into a file of another process, or has returned as bytes.

    Tensors come to host memory: the other process's device is not this one's.
    """
    # From the parent or another worker of this run, so not a stranger's pickle.
    if rest:
        return torch.load(io.BytesIO(rest), map_location="cpu", weights_only=False)
    return torch.load(path, map_location="cpu", weights_only=False, mmap=True)
