"""On which cores the server runs, and how workers are scheduled beside it.

The server is kept off the cores that workers compute on, where there are cores enough.

Linux wakes the server on the core of the worker that has rung for it, and, on a small machine, does
not always look for an idle one: then the worker, which would go on computing, is held up while the
server works, and the other core does nothing. Moved once, the server is woken where it was.

Where there are not, a worker that the server has just released would take the core from the server,
which has others to answer. Workers have the scheduling policy for those who compute and are in no
hurry to be woken; the server takes a core from them, and they do not take it back.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_PROCESSOR = 39 - 3  # field 39 of /proc/<pid>/stat, counted from the third (proc_pid_stat(5))


def stand_aside(workers: Iterable[int]) -> bool:
    """Move the calling thread to a core without a worker, if it shares one and there is another.

    Args:
        workers: process numbers.

    Returns:
        Whether it was moved.
    """
    if not sys.platform.startswith("linux"):
        return False
    allowed = os.sched_getaffinity(0)
    taken = {core for pid in workers if (core := last_core(pid)) is not None}
    free = allowed - taken
    if not free or last_core(os.getpid()) not in taken:
        return False
    os.sched_setaffinity(0, free)  # it takes effect before the call returns
    os.sched_setaffinity(0, allowed)
    return True


def yield_when_woken() -> bool:
    """Let this process take no core from who runs there; its share of the time is the same.

    Returns:
        Whether that was done: not where the user has chosen another policy (``chrt``, ``SCHED_*``
        of sched(7)), or the system refuses it.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return False
    try:
        if os.sched_getscheduler(0) != os.SCHED_OTHER:
            return False
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError:
        return False
    return True


def last_core(pid: int) -> int | None:
    """The core that the process' first thread has run on last, or ``None`` if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[_PROCESSOR])
    except (OSError, IndexError, ValueError):
        return None


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch's OpenMP team out of the server: it would spin on the workers' cores."""
    former = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(former)
