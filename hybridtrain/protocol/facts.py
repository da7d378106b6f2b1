"""What can happen to a worker (facts), and what a policy may answer (orders).

A policy reads facts and writes orders; it never sees a tensor, a process or a clock. Facts are in
the past tense, orders in the imperative. ``worker`` is a number from 0; ``at_s`` is the time of the
world, in seconds from any origin.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Began:
    """Training begins; ``version`` updates are behind the parameters (of a resumed run)."""

    version: int


@dataclass(frozen=True, slots=True)
class Joined:
    """The worker is there, computes from the newest parameters, and will push."""

    worker: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker could begin a mini-batch, and waits for its release.

    Only where workers take turns, or ask (:class:`hybridtrain.policies.Needs`).
    """

    worker: int


@dataclass(frozen=True, slots=True)
class Pushed:
    """The worker's contribution lies in its row; the worker waits for its release.

    ``loss`` is that of the mini-batch, where the policy watches it and the worker knows it.
    ``last``: nobody would do it again in this epoch, so what is dropped now is lost. ``empty``: it
    brings nothing that could move the masters.
    """

    worker: int
    at_s: float = 0.0
    loss: float | None = None
    last: bool = False
    empty: bool = False


@dataclass(frozen=True, slots=True)
class Waiting:
    """The worker waits for something else than its release (a barrier, the end of an epoch).

    Nobody may wait for it; its next push ends the parking.
    """

    worker: int


@dataclass(frozen=True, slots=True)
class Left:
    """The worker is gone for good, with everything it had not pushed."""

    worker: int


@dataclass(frozen=True, slots=True)
class TimerFired:
    """It is at least as late as the last ``SetTimer`` has asked for."""

    at_s: float


Fact = Began | Joined | Ready | Pushed | Waiting | Left | TimerFired


@dataclass(frozen=True, slots=True)
class Apply:
    """Merge these workers' contributions, and all that are held, and step the masters once."""

    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Put these workers' contributions aside, so that they may go on; the next update has them."""

    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """These workers' contributions do not count."""

    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Let these workers go on from the current master parameters."""

    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Say so when it is that late (``TimerFired``). Replaces what was asked for before."""

    at_s: float


Order = Apply | Accumulate | Drop | Release | SetTimer
