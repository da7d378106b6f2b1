"""Ends processes that user code has forked from a worker (``os.fork``), before they would train.

Theory of operation. The child inherits the worker's channel, heartbeat, shared memory and stack.
After the fork channel and heartbeat are closed, and shared memory is remapped as a private copy.
The child may run user code. When it returns or raises to Lightning or this package, a trace
function ends it; training without such children costs nothing. Children of ``multiprocessing``
(data loaders) never return there.
"""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any, NoReturn

from hybridtrain.util.anonymous_files import stop_sharing_maps
from hybridtrain.worker.client import Client
from hybridtrain.worlds.local.channel import Channel, ChannelClosed

_FRAMEWORKS = ("hybridtrain.", "pytorch_lightning.", "torch.utils.data.")
_CANNOT_TRAIN = (
    "This process was forked from a worker by os.fork() and cannot train; only the worker can. "
    "Let it end with os._exit(), or use multiprocessing or subprocess."
)


def mute_children(client: Client, channel: Channel) -> None:
    """Disconnect and end the future forks of this process, a worker."""

    def mute() -> None:
        channel.close()
        client.heartbeat.fall_silent()
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
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
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
