"""Files without a name: gone with the last process that holds them, however it ended."""

from __future__ import annotations

import os
import tempfile


def anonymous_descriptor() -> int:
    """A descriptor of an empty file that no path leads to, and that only this user may open."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("hybridtrain", os.MFD_CLOEXEC)
        os.fchmod(fd, 0o600)  # through /proc, where nobody else gets to either
        return fd
    with tempfile.TemporaryFile() as file:  # macOS: an unlinked file
        return os.dup(file.fileno())
