"""A nameless file that another process of this host writes and this one maps."""

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
    """Receives what is too large for a message. Freed with the last tensor loaded from it.

    ``path``: for the other process to open; empty where there is no ``/proc``.

    Args:
        apart: the other process may be on another host: there is no file.
    """

    def __init__(self, apart: bool = False) -> None:
        self._fd = anonymous_descriptor() if _OF_PROCESSES.is_dir() and not apart else -1
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}" if self._fd >= 0 else ""
        self._closed = weakref.finalize(self, os.close, self._fd) if self._fd >= 0 else None

    def close(self) -> None:
        """Close the descriptor; loaded tensors stay valid."""
        if self._closed is not None:
            self._closed()


def fill(path: str, content: Any) -> bytes:
    """Write ``content`` to a scratch file; if that fails, return it as bytes."""
    if path:
        try:
            with Path(path).open("wb") as file:
                torch.save(content, file)
            return b""
        except (OSError, RuntimeError):  # no memory left, or the asking process has ended
            pass
    return as_bytes(content)


def as_bytes(content: Any) -> bytes:
    """Serialise with ``torch.save``."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def read(path: str, rest: bytes = b"") -> Any:
    """Load what :func:`fill` has written to ``path``, or :func:`as_bytes` has made as ``rest``.

    Tensors are loaded to the CPU, since the other process may have used another device; those of a
    file are views of it.
    """
    # From the parent or another worker of this run, so not a stranger's pickle; states of modules
    # may hold any object (get_extra_state).
    if rest:
        return torch.load(io.BytesIO(rest), map_location="cpu", weights_only=False)
    return torch.load(path, map_location="cpu", weights_only=False, mmap=True)
