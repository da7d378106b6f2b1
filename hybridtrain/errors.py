"""The exceptions whose message is all that a user needs."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input. The message says what was given, what is allowed, and what to do.

    The command line prints it as a single line and exits with status 2; from Python it is an
    ordinary ``ValueError``.
    """


AT_LIMIT = (
    "this user has as many processes and threads as its limit allows; raise it (ulimit -u), end "
    "others, or use fewer workers"
)


class Lost(RuntimeError):
    """A process or host of the run has ended by itself; a traceback of this one says nothing more.

    The command line prints it as a single line and exits with status 1.
    """
