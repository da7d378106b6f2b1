"""What the world is to do next, as the roster says (:mod:`hybridtrain.recovery.roster`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask ``teller`` where training is, for ``worker``; ``question``: the number of this one."""

    teller: int
    worker: int
    question: int


@dataclass(frozen=True, slots=True)
class Start:
    """Start a process as ``worker``, which goes on from where training was then."""

    worker: int
    told: bytes


@dataclass(frozen=True, slots=True)
class Name:
    """Tell ``worker``, which has stopped, whether it writes the last checkpoint."""

    worker: int
    saves: bool


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The run ends, because of this ``worker``."""

    worker: int
    reason: str


@dataclass(frozen=True, slots=True)
class Say:
    """To the user."""

    text: str


@dataclass(frozen=True, slots=True)
class BreakOff:
    """Whoever waits in a step or a meeting need not any longer: it is late."""


@dataclass(frozen=True, slots=True)
class Kill:
    """End its process: nothing is to be expected of ``worker`` any more."""

    worker: int


@dataclass(frozen=True, slots=True)
class KillAll:
    """At once."""


Act = Ask | Start | Name | GiveUp | Say | BreakOff | Kill | KillAll
