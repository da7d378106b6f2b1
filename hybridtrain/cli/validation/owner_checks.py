"""Whoever can write to a run's configuration or record decides what code runs when it is used.

Checkpoints, summaries and profiles are data, whoever has made them. But to go on with a run, or to
replay it, is to make the classes that it names.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from hybridtrain.errors import UserError


def check_owner(path: Path, purpose: str) -> None:
    """Only this user, or the system's, can have written it.

    Args:
        path: what names code.
        purpose: what is to be done with it, as the user has said it.

    Raises:
        UserError: if somebody else can.
    """
    found = path.stat()
    if found.st_uid not in (os.geteuid(), 0):
        raise UserError(
            f"{purpose}: {path} belongs to another user (number {found.st_uid}), and names the "
            "code that would be run; if you trust it, make a copy and give that"
        )
    if found.st_mode & stat.S_IWOTH:
        raise UserError(
            f"{purpose}: {path} can be written by everybody, and names the code that would be run; "
            f"if you trust it, say chmod o-w {path}"
        )
