"""A process that user code has forked from a worker (``os.fork``) does not train.

Theory of operation. The child has the worker's line, its heartbeat, its shared memory and its
stack. As it begins, its ends of line and heartbeat are closed, and shared memory becomes a copy of
its own. What it does in user code is the user's. It ends where it would come back to Lightning or
to this package, by returning or by raising: there a trace function waits, so that training without
children costs nothing. A child of ``multiprocessing`` (a data loader's process) never comes back.
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
    """Whatever is forked from this process, the worker, from now on does not speak for it."""

    def mute() -> None:
        channel.close()
        client.heartbeat.fall_silent()
        stop_sharing_maps()
        _end_behind_user_code(sys._getframe(1))

    os.register_at_fork(after_in_child=mute)


def _end_behind_user_code(frame: FrameType | None) -> None:
    """End this process when it comes back to the nearest caller that is no user code."""
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
    """It has come back; functions that the worker has registered for its exit are not run."""
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
    """As Python's; says what it would say."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    if isinstance(error, ChannelClosed):
        error.add_note(_CANNOT_TRAIN)
    sys.excepthook(type(error), error, error.__traceback__)
    return 1
