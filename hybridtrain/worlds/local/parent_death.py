"""Children end with their parent, however it ends: Linux kills them, if each of them asks for it.

Workers ask first of all. A worker that is killed cannot tell the processes of its data loader to
go either. Torch lets them look every five seconds whether it is still there, but only between
mini-batches: one that waits inside the data set (for a disk, a lock, a network) stays for ever.
So what torch runs in them is made to ask first, too.

Who is forked by multiprocessing's fork server is not a child of the process that wants it, and the
server stays as long as any of its children: there a thread waits for that process' end.
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

from hybridtrain.worlds.local.cleanup import announced_reader

_PR_SET_PDEATHSIG = 1

_their_loop = _torch._worker_loop
_owner = (0, 0)  # process and thread whose data loaders these are to be


def die_with_parent(parent_pid: int | None) -> None:
    """Ask Linux to kill this process when its parent ends, however it ends.

    Args:
        parent_pid: the parent; ``None`` where it cannot be known who that is.
    """
    if parent_pid is None:
        _follow()
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if (
        parent_pid is not None and os.getppid() != parent_pid
    ):  # it ended before the request was in place
        os._exit(1)


def _follow() -> None:
    """Where a fork server is in between: end with the process that this one works for."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid == os.getppid():
        return

    def wait() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="hybridtrain-parent", daemon=True).start()


def bind_loaders() -> None:
    """From now on the processes of this process' data loaders end when it does.

    To be called in a thread that stays until then: the kernel's bond is with the thread that forks.
    """
    global _owner
    _owner = (os.getpid(), threading.get_ident())
    _torch._worker_loop = _loop  # torch looks it up whenever it starts a process


def _loop(*args: Any, **options: Any) -> None:
    """The main function of a data loader's process; found by its name, if that was spawned."""
    parent = multiprocessing.parent_process()
    forked = (0 if parent is None else parent.pid, threading.get_ident())  # a fork keeps its thread
    spawned = _owner == (0, 0) and parent is not None and parent.pid == os.getppid()
    if parent is not None and (forked == _owner or spawned):
        die_with_parent(parent.pid)
    elif _owner == (0, 0):
        _follow()
    with announced_reader():
        _their_loop(*args, **options)
