"""What small commands of ``name=value`` arguments share: how they are read, and how they end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches

from hybridtrain.errors import UserError
from hybridtrain.util.standard_streams import hold_standard_streams


def options(
    arguments: Sequence[str], known: Sequence[str], families: Sequence[str] = ()
) -> dict[str, str]:
    """``name=value`` arguments, by name.

    Args:
        known: the names there are.
        families: those among them that also have members, as in ``slower.3=2``.

    Raises:
        UserError: naming what is not known, and what was meant.
    """
    given: dict[str, str] = {}
    for argument in arguments:
        name, separator, value = argument.partition("=")
        family, member, _ = name.partition(".")
        of = family if member and family in families else name
        if of not in known or not separator or not value:
            close = get_close_matches(name, known, n=1)
            hint = f" (did you mean {close[0]}=...?)" if close else ""
            raise UserError(f"{argument!r} was given{hint}; known are {', '.join(known)}")
        given[name] = value
    return given


def command(
    action: Callable[[Sequence[str]], int | None],
    usage: str | None,
    arguments: Sequence[str] | None,
) -> int:
    """Run ``action`` on the arguments, by default those of the process; returns the exit status.

    What ``action`` returns, or 0; 0 after ``usage`` for ``-h`` and ``--help``; 2 after one line on
    standard error for bad input; 130 after Ctrl-C.
    """
    hold_standard_streams()
    given = sys.argv[1:] if arguments is None else list(arguments)
    if {"-h", "--help"} & set(given):
        print(usage)
        return 0
    try:
        status = action(given)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status or 0
