"""A process that user code has forked from a worker (``os.fork``) does not speak for the worker.

It has the worker's line, its heartbeat and its stack, so an exception in it, or ``sys.exit``, goes
up through this package as one of the worker would. Its ends of line and heartbeat are closed as it
begins; it ends as the child of any other program would, with its own traceback and exit status.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from hybridtrain.worker.client import Client
from hybridtrain.worlds.local.channel import Channel, ChannelClosed


def mute_children(client: Client, channel: Channel) -> None:
    """Whatever is forked from this process, the worker, from now on has no line to the server."""

    def mute() -> None:
        channel.close()
        client.heartbeat.fall_silent()

    os.register_at_fork(after_in_child=mute)


def end_child(error: BaseException | None) -> NoReturn:
    """End this process, which has come to the end of the worker's main function by ``error``.

    Functions that the worker has registered for its own exit are not run.
    """
    status = 0 if error is None else _status_of(error)
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
        error.add_note(
            "This process was forked from a worker by os.fork() and cannot train; only the worker "
            "can. Let it end with os._exit(), or use multiprocessing or subprocess."
        )
    sys.excepthook(type(error), error, error.__traceback__)
    return 1
