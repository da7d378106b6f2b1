"""Signals as events of a loop, so that none interrupts an update."""

from __future__ import annotations

import os
import selectors
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


def ending_signals() -> list[int]:
    """Signals that end a run; SIGHUP (closed terminal) unless it is ignored (nohup)."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]


def restore(handlers: Mapping[int, Any]) -> None:
    """Set handlers that ``signal.signal`` has returned; the default for one not set from Python."""
    for signum, handler in handlers.items():
        signal.signal(signum, signal.SIG_DFL if handler is None else handler)


class Interrupted(BaseException):
    """The signal ``signum`` ended the run.

    ``results``: of the workers, in their order; ``None`` if not finished.
    """

    def __init__(self, signum: int, results: Sequence[Any] = ()) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum, self.results = signum, results


def wait_unless_signalled(seconds: float) -> None:
    """Sleep.

    Raises:
        Interrupted: at a signal that ends a run.
    """
    caught: list[int] = []
    with selectors.DefaultSelector() as selector, caught_signals(caught, selector):
        selector.select(seconds)
    if caught:
        raise Interrupted(caught[0])


@contextmanager
def caught_signals(caught: list[int], selector: selectors.BaseSelector) -> Iterator[None]:
    """Append signals that end a run to ``caught``, and wake the selector.

    Does nothing outside the main thread, which alone can catch signals.
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
        restore(former)
        signal.set_wakeup_fd(wakeup)
        os.close(read_fd)
        os.close(write_fd)
