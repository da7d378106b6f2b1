"""Anonymous shared memory: the kernel frees it with the last process that has it open."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from typing import Any
from weakref import WeakKeyDictionary

_MAP_FIXED = 0x10  # of Linux and macOS
_shared: WeakKeyDictionary[object, tuple[int, mmap.mmap]] = WeakKeyDictionary()  # by their owners


def anonymous_descriptor() -> int:
    """A descriptor of an empty file that no path leads to, and that only this user may open."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("hybridtrain", os.MFD_CLOEXEC)
        os.fchmod(fd, 0o600)  # through /proc, where nobody else gets to either
        return fd
    with tempfile.TemporaryFile() as file:  # macOS: an unlinked file
        return os.dup(file.fileno())


def shared_map(owner: object, fd: int, n_bytes: int) -> mmap.mmap:
    """Map the file for ``owner``, which keeps ``fd`` open as long as it lives."""
    made = mmap.mmap(fd, n_bytes)
    _shared[owner] = fd, made
    return made


def stop_sharing_maps() -> None:
    """Make all shared maps private to this forked process.

    Each map stays at its address, so tensors over it stay valid.
    """
    map_again, access = ctypes.CDLL(None).mmap, mmap.PROT_READ | mmap.PROT_WRITE
    for fd, each in list(_shared.values()):
        place = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(each)))
        kind, offset = mmap.MAP_PRIVATE | _MAP_FIXED, ctypes.c_long(0)
        map_again(place, ctypes.c_size_t(len(each)), access, kind, fd, offset)


class SharedBytes:
    """Shared memory, zero at first; a copy pickled into a child process maps the same bytes.

    The process that makes it keeps the file open.

    Args:
        n_bytes: how many.
    """

    def __init__(self, n_bytes: int) -> None:
        self._kept: int | None = anonymous_descriptor()  # kept open: children open it by its path
        fd = self._kept
        self._path, self._n_bytes = f"/proc/{os.getpid()}/fd/{fd}", n_bytes
        os.ftruncate(fd, n_bytes)
        self.map = shared_map(self, fd, n_bytes)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("map", "_kept")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._kept = None
        fd = os.open(self._path, os.O_RDWR)
        self.map = mmap.mmap(fd, self._n_bytes)
        os.close(fd)

    def close(self) -> None:
        """Unmap it in this process."""
        _shared.pop(self, None)
        self.map.close()
        if self._kept is not None:
            os.close(self._kept)
            self._kept = None
