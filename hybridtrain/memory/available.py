"""How much memory is free.

Linux overcommits memory. Reserving pages of a shared file that is too large does not fail; the
out-of-memory killer ends a process instead. So the free memory is read first.
"""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")  # a container sees its own group here


def available_bytes() -> int | None:
    """What could be allocated now on this machine and in this container; ``None`` if unknown."""
    known = [n for n in (_of_machine(), _of_container()) if n is not None]
    return min(known, default=None)


def _of_machine() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if "MemAvailable" in line), None)


def _of_container() -> int | None:
    """The limit of the control group (version 2), less what is in use and cannot be dropped."""
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such group, or no limit ("max")
        return None
    return max(0, limit - used + int(stat.get("inactive_file", 0)))
