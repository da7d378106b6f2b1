"""End a command: exit status after a signal, and no process left running."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from pytorch_lightning.utilities.exceptions import SIGTERMException

from hybridtrain.cli.exit_status import CommandOutcome, exit_code, interrupted
from hybridtrain.worlds.local.signals import ending_signals


def mapping_signals(
    body: Callable[[], CommandOutcome], strategy: Callable[[], Any]
) -> CommandOutcome:
    """Run ``body``; after a signal return 128 + its number, where Lightning exits with 1.

    Args:
        strategy: returns the trainer's strategy, if there is one; it may know the signal.
    """
    try:
        return body()
    except KeyboardInterrupt:
        return interrupted(signal.SIGINT)
    except SIGTERMException:
        return interrupted(signal.SIGTERM)
    except SystemExit as stop:
        known = getattr(strategy(), "interrupted_by", None)
        if known is not None:
            return interrupted(int(known))
        if isinstance(stop.__context__, KeyboardInterrupt):
            return interrupted(signal.SIGINT)
        return CommandOutcome(exit=exit_code(stop))


@contextmanager
def terminating() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exception, so that callbacks save and children stop."""

    def stop(signum: int, _: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    try:
        before = {s: signal.signal(s, stop) for s in ending_signals() if s != signal.SIGINT}
    except ValueError:  # not in the main thread
        yield
        return
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        signal.signal(signal.SIGINT, interrupt)  # Lightning ignores it after the first


@contextmanager
def no_process_left() -> Iterator[None]:
    """Kill child processes that an interrupted strategy leaves (Lightning's forked DDP does)."""
    before = {x.pid for x in multiprocessing.active_children()}
    try:
        yield
    finally:
        left = [x for x in multiprocessing.active_children() if x.pid not in before]
        for child in left:
            child.join(timeout=2.0)
            child.kill()
            child.join()
