"""Events: the inputs of the server, which a world reports one at a time.

In the past tense, as the facts that the server derives from them for its policy
(:mod:`hybridtrain.engine.protocol.facts`). ``worker`` is a number from 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from hybridtrain.engine.protocol.messages import Note, Push, Request


@dataclass(frozen=True, slots=True)
class Received:
    """A request or a note of the worker has arrived."""

    worker: int
    message: Request | Note


@dataclass(frozen=True, slots=True)
class Completed:
    """The worker has finished, and will enter no further meeting."""

    worker: int


@dataclass(frozen=True, slots=True)
class Removed:
    """The worker's process is gone, and what it had not pushed is lost.

    ``announced``: the server tells the others, which continue without it. ``returns``: the worker
    will be restarted.
    """

    worker: int
    announced: bool = False
    returns: bool = False


@dataclass(frozen=True, slots=True)
class Restarted:
    """A new process runs as this worker; meetings wait for it."""

    worker: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """The worker begins (anew) with the newest parameters; its pending push does not count."""

    worker: int


@dataclass(frozen=True, slots=True)
class Looked:
    """Some time has passed: the server counts the updates that workers have made without it."""


@dataclass(frozen=True, slots=True)
class TimerExpired:
    """The time ``wake_at_s`` of the server is reached."""


@dataclass(frozen=True, slots=True)
class UpdateDue:
    """Replies have been sent: the update that was put behind them (``ReleaseThenApply``) is due."""


@dataclass(frozen=True, slots=True)
class BrokenOff:
    """The time to stop is over: workers no longer wait for one another."""


class NotArrived(BaseException):
    """A row of a contribution will not arrive."""


class Arrivals(Protocol):
    """Rows that are on their way, each from its beginning to its end."""

    def wait(self, element: int) -> None:
        """Wait until all rows are here up to this element; by any thread.

        Raises:
            NotArrived: if one will not come, or after ``give_up``.
        """

    def give_up(self) -> None:
        """End all waiting."""


@dataclass(frozen=True, slots=True)
class Announced:
    """Pushes that will be received, by worker, when their rows have arrived from other hosts."""

    pushes: Mapping[int, Push]
    arrivals: Arrivals


Event = (
    Received
    | Completed
    | Removed
    | Restarted
    | Admitted
    | Looked
    | TimerExpired
    | UpdateDue
    | BrokenOff
    | Announced
)
