"""The one exception a user is meant to read."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input. The message says what was given, what is allowed, and what to do.

    The command line prints it as a single line and exits with status 2; from Python it is an
    ordinary ``ValueError``.
    """
