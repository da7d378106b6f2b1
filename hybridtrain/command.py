"""How a small command of ``name=value`` arguments ends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from hybridtrain.errors import UserError


def command(
    action: Callable[[Sequence[str]], None], usage: str | None, arguments: Sequence[str] | None
) -> int:
    """Run ``action`` on the arguments, by default those of the process; returns the exit status.

    0; 0 after ``usage`` for ``-h`` and ``--help``; 2 after one line on standard error for bad
    input; 130 after Ctrl-C.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    if {"-h", "--help"} & set(given):
        print(usage)
        return 0
    try:
        action(given)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
