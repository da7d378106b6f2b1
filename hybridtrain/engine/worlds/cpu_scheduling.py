"""CPU scheduling of server and workers.

With enough cores, the server is kept off the cores of workers. Linux wakes the server on the core
of the worker that rang its bell, and on a small machine does not always look for an idle one: the
worker is delayed while another core is idle. Once moved, the server is woken on its last core.

With fewer cores, a released worker would preempt the server, which has other workers to answer.
Workers therefore run under ``SCHED_BATCH``: the server preempts them, and they do not preempt it.
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
    """Move the calling thread off a worker's core if another one is free; whether it was moved.

    Args:
        workers: process numbers.
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
    """Run this process under ``SCHED_BATCH``: it preempts no others, its share of time is the same.

    Returns:
        False if the user has chosen another policy (``chrt``, sched(7)), or the system refuses.
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
    """The last core of the process' first thread, or ``None`` if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[_PROCESSOR])
    except (OSError, IndexError, ValueError):
        return None


@contextmanager
def one_thread() -> Iterator[None]:
    """Disable torch's OpenMP threads in the server: they would spin on the workers' cores."""
    former = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(former)
