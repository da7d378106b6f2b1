"""The main function of a worker process."""

from __future__ import annotations

import atexit
import builtins
import ctypes
import os
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from types import FrameType
from typing import Any, NoReturn

import torch

from hybridtrain.engine.monitoring.hang_detector import Doing, Heartbeat
from hybridtrain.engine.protocol.messages import Stopped
from hybridtrain.engine.worker.client import Client
from hybridtrain.engine.worker.inbox import StopRequested
from hybridtrain.engine.worlds.channel import Channel, ChannelClosed, SharedBells
from hybridtrain.engine.worlds.cpu_scheduling import yield_when_woken
from hybridtrain.engine.worlds.inherited import end_pools, own_files, own_finalizers, own_pools
from hybridtrain.engine.worlds.parent_death import bind_loaders, die_with_parent
from hybridtrain.engine.worlds.signals import ending_signals
from hybridtrain.engine.worlds.worker_exit import Failed, Finished
from hybridtrain.errors import UserError
from hybridtrain.util.anonymous_files import stop_sharing_maps
from hybridtrain.util.streams import flush_output, own_showwarning

# ---- forks of a worker --------------------------------------------------------------------------
# Ends processes that user code has forked from a worker (``os.fork``), before they would train.
# Theory of operation. The child inherits the worker's channel, heartbeat, shared memory and stack.
# After the fork channel and heartbeat are closed, and shared memory is remapped as a private copy.
# The child may run user code. When it returns or raises to Lightning or this package, a trace
# function ends it; training without such children costs nothing. Children of ``multiprocessing``
# (data loaders) never return there.

_FRAMEWORKS = ("hybridtrain.", "pytorch_lightning.", "torch.utils.data.")
_CANNOT_TRAIN = (
    "This process was forked from a worker by os.fork() and cannot train; only the worker can. "
    "Let it end with os._exit(), or use multiprocessing or subprocess."
)


def mute_children(heartbeat: Heartbeat, channel: Channel) -> None:
    """Disconnect and end the future forks of this process, a worker."""

    def mute() -> None:
        channel.close()
        heartbeat.fall_silent()
        stop_sharing_maps()
        _end_behind_user_code(sys._getframe(1))

    os.register_at_fork(after_in_child=mute)


def _end_behind_user_code(frame: FrameType | None) -> None:
    """End this process when it returns to the nearest caller that is no user code."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name.startswith("multiprocessing."):
            return
        if name.startswith(_FRAMEWORKS):
            frame.f_trace = _end
            sys.settrace(lambda *_: None)
            return
        frame = frame.f_back


def _end(_: FrameType, event: str, what: Any) -> NoReturn:
    """Exit, without running the worker's ``atexit`` functions."""
    sys.settrace(None)
    if event == "exception":
        status = _status_of(what[1])
    else:
        status = 1
        print(_CANNOT_TRAIN, file=sys.stderr)
    flush_output()
    os._exit(status)


def _status_of(error: BaseException) -> int:
    """Print the error and return the exit status, as Python does."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    if isinstance(error, ChannelClosed):
        error.add_note(_CANNOT_TRAIN)
    sys.excepthook(type(error), error, error.__traceback__)
    return 1


Body = Callable[[Client], Any]
SocketPair = tuple[socket.socket, socket.socket]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 * 2**20  # glibc refuses more on 64-bit systems


@dataclass(frozen=True)
class WorkerStart:
    """The parent's parameters for a worker; ``parent_pid``: ``None`` behind a fork server.

    ``apart``: there are workers on other hosts; ``blas``: the parent's :func:`blas_libraries`, if
    the worker is forked; else ``environment`` has the parent's variables, seeds among them. A fork
    server that runs already has those of the moment at which it was started.
    """

    worker: int
    n_workers: int
    threads: int
    parent_pid: int | None
    bells: tuple[int, ...] = ()  # of all workers, if they may make updates in shared memory
    apart: bool = False
    blas: Any = None
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """With the way in which a command shows warnings."""
        return {**vars(self), "showwarning": own_showwarning()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In a new process, before the modules of the body are imported."""
        if (show := state.pop("showwarning")) is not None:
            warnings.showwarning = show
        vars(self).update(state)
        if self.environment:
            os.environ.clear()
            os.environ.update(self.environment)

    def arguments(
        self, body: Body, pairs: Mapping[int, SocketPair], lines: Sequence[socket.socket] | None
    ) -> tuple[Any, ...]:
        """Arguments of ``run_worker``; ``lines``: inherited sockets that it must close."""
        mine = pairs[self.worker][1]
        others = [each for pair in pairs.values() for each in pair if each is not mine]
        return self, mine, body, [] if lines is None else [*others, *lines]


def run_worker(
    start: WorkerStart, sock: socket.socket, body: Body, inherited: list[socket.socket]
) -> None:
    """Run ``body`` in a worker process, and report its result or exception to the parent."""
    for other in inherited:
        other.close()  # or this worker would keep its siblings' sockets open
    if inherited:
        atexit._clear()  # forked: these functions are the parent's
        own_finalizers()
        own_pools()
        if start.n_workers > 1:
            own_files()
        leave_notebook()
    _prepare_process(start)
    channel = Channel(sock)
    bells = SharedBells(channel, start.worker, start.bells) if start.bells else None
    try:
        heartbeat = Heartbeat(channel.take_bells())
        client = Client(
            start.worker, start.n_workers, channel, start.apart, heartbeat=heartbeat, bells=bells
        )
        heartbeat.tell_stacks()
        mute_children(heartbeat, channel)
        outcome = _outcome(client, body)
        heartbeat.beat(Doing.ENDING)
        with suppress(Exception):
            atexit._run_exitfuncs()  # of loggers that upload; multiprocessing skips them
        with suppress(Exception):
            end_pools()
        if outcome is not None:
            _report(channel, outcome)
    except ChannelClosed:
        flush_output()
        os._exit(1)  # the parent is gone
    finally:
        channel.close()


def _outcome(client: Client, body: Body) -> Finished | Failed | Stopped | None:
    try:
        return Finished(body(client), client.group.is_leader)
    except BaseException as error:  # SystemExit too: the parent must know
        if isinstance(error, StopRequested):
            return Stopped()
        if isinstance(error, ChannelClosed):
            raise
        return None if client.heartbeat.failed_in else Failed.of(error, client.heartbeat.where)


def _report(channel: Channel, outcome: Finished | Failed | Stopped) -> None:
    flush_output()
    try:
        channel.send(outcome)
    except ChannelClosed:
        raise
    except Exception as error:  # a result that cannot be pickled
        problem = UserError(
            f"what the worker returns cannot be sent to the calling process ({error}); return "
            "numbers, arrays, tensors, or other objects that can be pickled"
        )
        channel.send(Failed.of(problem))


def _prepare_process(start: WorkerStart) -> None:
    die_with_parent(start.parent_pid)
    bind_loaders()
    # Ctrl-C reaches the whole process group, a service manager's SIGTERM often too. Only the parent
    # handles them, so that the run ends in order.
    signal.set_wakeup_fd(-1)  # the parent's, if forked
    for signum in ending_signals():
        signal.signal(signum, signal.SIG_IGN)
    keep_freed_memory()
    yield_when_woken()
    torch.set_num_threads(start.threads)
    blas = blas_libraries() if start.blas is None else start.blas
    blas.limit(limits=start.threads)  # numpy's, of the loop of a user
    torch.set_flush_denormal(True)  # denormal gradients make arithmetic 1.7 times slower


def blas_libraries() -> Any:
    """The linear algebra libraries of this process, as ``threadpoolctl`` controls them.

    To find them takes up to 30 ms, so forked workers get what their parent has found.
    """
    variable = "KMP_DUPLICATE_LIB_OK"  # which the module sets
    former = os.environ.get(variable)
    import threadpoolctl  # noqa: F401  (here, or it would cost every import of the package)

    if former is None:
        os.environ.pop(variable, None)
    return _blas_libraries(len(sys.modules))


@lru_cache(maxsize=1)
def _blas_libraries(n_modules: int) -> Any:
    """Found again once further modules are imported, which may have brought more."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")


def leave_notebook() -> None:
    """Make libraries print, in a process forked from a notebook's.

    What they displayed would need the notebook's own connection, which drops it.
    """
    ipython = sys.modules.get("IPython.core.interactiveshell")
    if ipython is None or vars(builtins).pop("get_ipython", None) is None:
        return
    ipython.InteractiveShell.clear_instance()
    os.environ.pop("FORCE_COLOR", None)  # the kernel's: rich would believe in a terminal
    if (rich := sys.modules.get("rich")) is not None:
        rich.reconfigure()


def keep_freed_memory() -> None:
    """Keep glibc from returning every large temporary to the kernel."""
    with suppress(OSError, AttributeError):  # not glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
