"""What can happen to a server: everything that a world tells it, one event at a time.

In the past tense, as facts are (:mod:`hybridtrain.protocol.facts`), which are what a policy is told
of it. ``worker`` is a number from 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridtrain.protocol.messages import Note, Request


@dataclass(frozen=True, slots=True)
class Received:
    """A request or a note of the worker has arrived."""

    worker: int
    message: Request | Note


@dataclass(frozen=True, slots=True)
class Completed:
    """The worker has done its job; a meeting that waits for it would wait for ever."""

    worker: int


@dataclass(frozen=True, slots=True)
class Removed:
    """The worker's process is gone, with whatever it had not pushed.

    ``announced``: the others hear of it, and go on without it. ``returns``: another process will
    take its place.
    """

    worker: int
    announced: bool = False
    returns: bool = False


@dataclass(frozen=True, slots=True)
class Restarted:
    """A new process begins as this worker; whoever comes to a meeting waits for it."""

    worker: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """The worker begins (anew) with the newest parameters; what it did before does not count."""

    worker: int


@dataclass(frozen=True, slots=True)
class Looked:
    """Some time has passed: what workers have done among themselves may be counted."""


@dataclass(frozen=True, slots=True)
class TimerExpired:
    """It is at least as late as the server's ``wake_at_s``."""


@dataclass(frozen=True, slots=True)
class UpdateEnded:
    """The update that the server has under way has ended. ``ticket``: its number."""

    ticket: int


@dataclass(frozen=True, slots=True)
class BrokenOff:
    """It is late: nobody is waited for any longer."""


Event = (
    Received
    | Completed
    | Removed
    | Restarted
    | Admitted
    | Looked
    | TimerExpired
    | UpdateEnded
    | BrokenOff
)
