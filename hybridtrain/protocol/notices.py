"""Notices: what the server sends to workers without a request.

A worker has left or is back, the run is to stop, or a restarted worker asks where training is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Number of a learning-rate schedule, arguments of its ``step``.
ScheduleCall = tuple[int, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Gone:
    """The worker is gone; update ``version`` was the last it may have had a part in.

    ``for_now``: another process will take its place.
    """

    worker: int
    version: int
    for_now: bool = False


@dataclass(frozen=True, slots=True)
class Back:
    """The worker is there again."""

    worker: int


@dataclass(frozen=True, slots=True)
class Called:
    """A worker has called ``step`` of learning-rate schedules in its mini-batches.

    It tells the server, and the server tells each other worker with its next answer.
    """

    calls: tuple[ScheduleCall, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop as soon as you can. ``now``: what you asked for will not be answered.

    ``behind``: only because a worker wants training to end, in the way that it ends elsewhere, as
    soon as so many updates are behind you.
    """

    now: bool = False
    behind: int | None = None


@dataclass(frozen=True, slots=True)
class SavePermission:
    """Answer to a worker that has stopped: write the last checkpoint (``saves``), or do not."""

    saves: bool


@dataclass(frozen=True, slots=True)
class Saved:
    """The last checkpoint has been written (``well``), or none is to be written."""

    well: bool


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """The worker is about to be restarted: say where training is (``Progress``), between two steps.

    ``question``: its number; an answer to an earlier one does not count any more.
    """

    worker: int
    question: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """Where training is, for the ``worker`` that is restarted, as ``torch.save`` writes it.

    For nobody (``None``): to be kept, in case that in the end nobody is there to be asked.
    """

    worker: int | None
    payload: bytes
    question: int = 0
