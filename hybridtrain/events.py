"""What can happen to a worker (facts), and what a policy may answer (orders).

A policy reads facts and writes orders; it never sees a tensor, a process or a clock. Facts are in
the past tense, orders in the imperative. ``worker`` is a number from 0; ``version`` counts the
updates of the master parameters.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Joined:
    """The worker is there and will push."""

    worker: int


@dataclass(frozen=True, slots=True)
class Pushed:
    """The worker's contribution lies in its row; the worker waits for its release."""

    worker: int


@dataclass(frozen=True, slots=True)
class Parked:
    """The worker waits for something else than its release (a barrier, the end of an epoch).

    Nobody may wait for it; its next push ends the parking.
    """

    worker: int


@dataclass(frozen=True, slots=True)
class Left:
    """The worker is gone for good, with everything it had not pushed."""

    worker: int


Fact = Joined | Pushed | Parked | Left


@dataclass(frozen=True, slots=True)
class Apply:
    """Merge these workers' contributions and step the master parameters once."""

    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Let these workers go on from the current master parameters."""

    workers: tuple[int, ...]


Order = Apply | Release
