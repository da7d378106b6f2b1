"""Standard input, output and error, as a shell or a service manager has left them."""

from __future__ import annotations

import os
import sys


def hold_standard_streams() -> None:
    """Open /dev/null in the place of standard streams that are closed (``>&-``).

    Else the next file that is opened gets the number, and what is printed is written to it.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number is free
        if getattr(sys, name) is None:
            vars(sys)[name] = open(fd, "w" if fd else "r", closefd=False)  # noqa: SIM115
