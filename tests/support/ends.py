"""Whether processes have ended, for tests that kill."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def first(mark: Path) -> bool:
    """Whether this process is the first of all that ask: it makes the file, in one call."""
    with suppress(FileExistsError):
        mark.touch(exist_ok=False)
        return True
    return False


def gone(pid: int) -> bool:
    """Ended, whether or not somebody has yet asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.01)
