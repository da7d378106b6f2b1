"""A lock between processes that goes with the process that holds it.

It is the kernel's, on the first byte of a file (POSIX record locks): whoever dies gives it back.
Threads of one process do not exclude each other by it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

try:
    import fcntl
except ImportError:  # Windows: there is none
    fcntl = None  # type: ignore[assignment]

_PAUSE_S = 5e-5  # between two tries


class KernelLock:
    """On the file behind ``fd``, of which no descriptor may be closed while it is held."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @contextmanager
    def held(self, waits: bool = True) -> Iterator[None]:
        """Hold it.

        Raises:
            BlockingIOError: if somebody else has it, and the caller does not want to wait.
        """
        fcntl.lockf(self._fd, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1)

    @contextmanager
    def within(self, for_s: float) -> Iterator[bool]:
        """Hold it, unless somebody else has it for so long; whether it is held."""
        taken = self._take(for_s)
        try:
            yield taken
        finally:
            if taken:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1)

    def _take(self, for_s: float) -> bool:
        until_s = 0.0
        while True:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
                return True
            except BlockingIOError:
                now_s = time.monotonic()
                until_s = until_s or now_s + for_s
                if now_s >= until_s:
                    return False
                time.sleep(_PAUSE_S)
