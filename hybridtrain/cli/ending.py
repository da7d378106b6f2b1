"""How a command ends: exit status after a signal, and no process left behind."""

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
    """Lightning turns Ctrl-C into exit status 1; give it back the shell's number.

    Args:
        strategy: the trainer's, if it has been made, which may know of the signal.
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
    """SIGTERM and SIGHUP end a run as an exception would: callbacks save, children stop."""

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
    """Kill what an interrupted strategy left behind (Lightning's forked DDP does)."""
    before = {x.pid for x in multiprocessing.active_children()}
    try:
        yield
    finally:
        left = [x for x in multiprocessing.active_children() if x.pid not in before]
        for child in left:
            child.join(timeout=2.0)
            child.kill()
            child.join()
