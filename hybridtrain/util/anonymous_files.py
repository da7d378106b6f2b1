"""Files without a name: gone with the last process that holds them, however it ended."""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import Any


def anonymous_descriptor() -> int:
    """A descriptor of an empty file that no path leads to, and that only this user may open."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("hybridtrain", os.MFD_CLOEXEC)
        os.fchmod(fd, 0o600)  # through /proc, where nobody else gets to either
        return fd
    with tempfile.TemporaryFile() as file:  # macOS: an unlinked file
        return os.dup(file.fileno())


class SharedBytes:
    """Zeros at first, for the process that makes them and all that it is sent to.

    Whoever makes it keeps it; a copy that is pickled into a child looks at the same memory.

    Args:
        n_bytes: how many.
    """

    def __init__(self, n_bytes: int) -> None:
        self._kept: int | None = anonymous_descriptor()  # or the path would lead nowhere
        fd = self._kept
        self._path, self._n_bytes = f"/proc/{os.getpid()}/fd/{fd}", n_bytes
        os.ftruncate(fd, n_bytes)
        self.map = mmap.mmap(fd, n_bytes)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("map", "_kept")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._kept = None
        fd = os.open(self._path, os.O_RDWR)
        self.map = mmap.mmap(fd, self._n_bytes)
        os.close(fd)

    def close(self) -> None:
        """This process looks no more."""
        self.map.close()
        if self._kept is not None:
            os.close(self._kept)
            self._kept = None
