"""Workers and data loaders end with their parent, however it ends (``PR_SET_PDEATHSIG``).

Each worker asks Linux to be killed with its parent. So do the processes of its data loader, by a
replacement of torch's worker loop: torch's own check, every five seconds, runs only between
mini-batches, so a process that waits inside the data set (for a disk, a lock) would stay forever.

A process forked by multiprocessing's fork server is not a child of the process that started it;
there a thread waits for that process' end.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from typing import Any

from torch.utils.data._utils import worker as _torch

from hybridtrain.util.cleanup import announced_reader

_PR_SET_PDEATHSIG = 1

_their_loop = _torch._worker_loop
_owner = (0, 0)  # process and thread that own the data loaders


def die_with_parent(parent_pid: int | None) -> None:
    """Ask Linux to kill this process when its parent ends.

    Args:
        parent_pid: the parent; ``None`` if unknown.
    """
    if parent_pid is None:
        _follow()
    if not sys.platform.startswith("linux"):
        return
    _at_its_end(signal.SIGKILL)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)  # it ended before the request


def end_with_engine() -> None:
    """Ask Linux to end this process by SIGTERM when torchrun's agent, which started it, ends."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform.startswith("linux"):
        _at_its_end(signal.SIGTERM)


def _at_its_end(signum: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)


def _follow() -> None:
    """Behind a fork server: end with the process that started this one."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid == os.getppid():
        return

    def wait() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="hybridtrain-parent", daemon=True).start()


def bind_loaders() -> None:
    """Let the data loaders' processes of this process end with it.

    Call it in a thread that lives as long: the signal is bound to the thread that forks.
    """
    global _owner
    _owner = (os.getpid(), threading.get_ident())
    _torch._worker_loop = _loop  # torch looks it up whenever it starts a process


def _loop(*args: Any, **options: Any) -> None:
    """Main function of a data loader's process; imported by name if spawned."""
    parent = multiprocessing.parent_process()
    forked = (0 if parent is None else parent.pid, threading.get_ident())  # a fork keeps its thread
    spawned = _owner == (0, 0) and parent is not None and parent.pid == os.getppid()
    if parent is not None and (forked == _owner or spawned):
        die_with_parent(parent.pid)
    elif _owner == (0, 0):
        _follow()
    with announced_reader():
        _their_loop(*args, **options)
