"""The outcome of a command: exit status, metric, readable error."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace

from hybridtrain.cli.explain import explain
from hybridtrain.engine.monitoring.watchdog import to_stderr
from hybridtrain.errors import Lost

FAILED, BAD_INPUT = 1, 2


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """The outcome of a run, or of the whole command."""

    exit: int = 0
    metric: float | None = None
    error: str | None = None
    directory: str | None = None


def interrupted(signum: int) -> CommandOutcome:
    """The outcome of a run ended by a signal: exit status 128 + its number."""
    return CommandOutcome(exit=128 + signum, error=f"ended by {signal.Signals(signum).name}")


def guarded(action: Callable[[], CommandOutcome], overrides: list[str]) -> CommandOutcome:
    """Run ``action`` and turn any exception into an outcome.

    Bad input becomes one line on stderr and status 2, a signal 128 + its number, anything else its
    traceback and status 1. ``overrides`` serve to explain errors of Hydra's.
    """
    try:
        return action()
    except KeyboardInterrupt:
        return interrupted(signal.SIGINT)
    except SystemExit as stop:
        known = 0 if stop.code is None else stop.code
        return CommandOutcome(exit=known if isinstance(known, int) else FAILED)
    except BrokenPipeError:  # the reader of our output has exited, as in `... --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return interrupted(signal.SIGPIPE)
    except BaseException as error:  # GeneratorExit and BaseExceptionGroup, too
        return _failure(error, overrides)


def printed(text: str, outcome: CommandOutcome) -> CommandOutcome:
    """Print a text and return the outcome; a failure if standard output cannot be written."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk
        line = f"the summary could not be printed ({error.strerror})"
        to_stderr(line)
        return replace(outcome, exit=outcome.exit or FAILED, error=outcome.error or line)
    return outcome


def _failure(error: BaseException, overrides: list[str]) -> CommandOutcome:
    line, code = explain(error, overrides), BAD_INPUT
    if line is None and isinstance(error, Lost):
        line, code = " ".join(str(error).split()), FAILED
    if line is None or os.environ.get("HYBRIDTRAIN_DEBUG") == "1":
        traceback.print_exc()
    if line is None:
        return CommandOutcome(
            exit=FAILED, error=" ".join(f"{type(error).__name__}: {error}".split())
        )
    to_stderr(line)
    return CommandOutcome(exit=code, error=line)
