"""How long processes that could compute have waited for a core, as the kernel counts it.

On a machine with more work than cores everything takes longer, and nothing hangs: such time is not
to be held against a worker. Where the kernel does not count it (not Linux), it is 0.
"""

from __future__ import annotations

from pathlib import Path

_NS = 1e-9


class Starving:
    """Of several processes, since they were last asked about."""

    def __init__(self) -> None:
        self._known: dict[int, dict[str, int]] = {}  # process -> thread -> ns so far

    def since(self, pid: int) -> float:
        """Seconds, of the thread that has waited longest; 0 for a process not known before."""
        before, now = self._known.get(pid), _waited_ns(pid)
        self._known[pid] = now
        if before is None:
            return 0.0
        return _NS * max((ns - before.get(thread, ns) for thread, ns in now.items()), default=0)

    def forget(self, pids: set[int]) -> None:
        """All but these."""
        self._known = {pid: known for pid, known in self._known.items() if pid in pids}


def _waited_ns(pid: int) -> dict[str, int]:
    """By thread (``Documentation/scheduler/sched-stats.rst``: the second number)."""
    found = {}
    for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            found[task.parent.name] = int(task.read_text().split()[1])
        except (OSError, ValueError, IndexError):
            continue  # it has ended
    return found
