"""Standard streams that are closed, full, or lack characters: commands and training go on."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

_ESCAPED = "backslashreplace"


def hold_standard_streams() -> None:
    """Prepare the streams of a command: nothing that it prints is an error for its characters.

    Opens /dev/null in the place of standard streams that are closed (``>&-``). Else the next file
    that is opened gets the number, and what is printed is written to it. Characters that a stream
    lacks (``PYTHONIOENCODING=ascii``, a Latin-1 terminal, file names that are no UTF-8) are printed
    as escapes, also by processes that are started from here on.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number is free
        if getattr(sys, name) is None:
            vars(sys)[name] = open(fd, "w" if fd else "r", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=_ESCAPED)
    encoding = os.environ.get("PYTHONIOENCODING", "").partition(":")[0]
    os.environ["PYTHONIOENCODING"] = f"{encoding}:{_ESCAPED}"


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """``warnings.showwarning`` of a command: its users need no file, line and code."""
    text = f"warning: {' '.join(str(message).split())}"
    if file is None:
        say(text, error=True)
    else:
        file.write(f"{text}\n")


@contextmanager
def warnings_shown_by(show: Callable[..., None]) -> Iterator[None]:
    """Show warnings by this function meanwhile.

    Lightning replaces ``warnings.formatwarning`` when it is imported; this goes before it.
    """
    before = warnings.showwarning
    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


def own_showwarning() -> Callable[..., None] | None:
    """The function of this package that shows warnings; None: it is Python's, or a user's."""
    shown: Callable[..., None] = warnings.showwarning
    return shown if str(getattr(shown, "__module__", "")).startswith("hybridtrain.") else None


def flush_output() -> None:
    """Flush what was printed. A stream is ``None`` where a process began with it closed."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def say(text: str, *, error: bool = False) -> None:
    """Print a line on standard output (``error``: error) from within training, whatever happens.

    Characters that the stream lacks are escaped. A stream that is closed, full or read by nobody
    loses the line: training is worth more.
    """
    stream = sys.stderr if error else sys.stdout
    if stream is None:
        return
    try:
        try:
            print(text, file=stream, flush=True)
        except UnicodeEncodeError:
            encoding = stream.encoding or "ascii"
            print(text.encode(encoding, _ESCAPED).decode(encoding), file=stream, flush=True)
    except (OSError, ValueError):
        return


_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """The text with escapes for characters that would steer a terminal, as in others' names."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def printable_in(value: Any) -> Any:
    """A copy of plain values with :func:`printable` texts, keys included."""
    match value:
        case str():
            return printable(value)
        case dict():
            return {printable_in(key): printable_in(each) for key, each in value.items()}
        case list():
            return [printable_in(each) for each in value]
    return value
