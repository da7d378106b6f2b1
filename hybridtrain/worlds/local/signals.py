"""Signals as events of a loop, so that none hits an update half-way."""

from __future__ import annotations

import os
import selectors
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def ending_signals() -> list[int]:
    """Signals that end a run; SIGHUP, of a terminal that closes, unless it is ignored (nohup)."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]


class Interrupted(BaseException):
    """A signal ended the run. ``signum`` says which.

    ``results``: what workers had done by then, in their order; ``None`` of those that had not.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum, self.results = signum, list[Any]()


@contextmanager
def caught_signals(caught: list[int], selector: selectors.BaseSelector) -> Iterator[None]:
    """Signals that end a run are only noted in ``caught``, and wake the selector.

    Only the main thread can catch signals; elsewhere they are somebody else's.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    wakeup = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    former = {s: signal.signal(s, lambda n, _: caught.append(n)) for s in ending_signals()}
    selector.register(read_fd, selectors.EVENT_READ, ("signal", None))
    try:
        yield
    finally:
        for signum, handler in former.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(wakeup)
        os.close(read_fd)
        os.close(write_fd)
