"""Facts, the inputs of a policy, and orders, its outputs.

A policy never sees a tensor, a process or a clock. Facts are in the past tense, orders in the
imperative. ``worker`` is a number from 0; ``at_s`` is the time of the world, in seconds from any
origin.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Began:
    """Training begins, in a resumed run after ``version`` updates."""

    version: int


@dataclass(frozen=True, slots=True)
class Joined:
    """The worker computes, and will push.

    ``behind``: updates since it has read its parameters; 0: they are the newest.
    """

    worker: int
    behind: int = 0


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker waits for its release to begin a mini-batch.

    Only where workers take turns, or ask (:class:`hybridtrain.engine.policies.Needs`).
    """

    worker: int


@dataclass(frozen=True, slots=True)
class Pushed:
    """The worker's contribution lies in its row; the worker waits for its release.

    ``loss``: of the mini-batch, if the policy watches it and the worker knows it. ``last``: it
    must not be dropped, as no worker would repeat the mini-batch in this epoch, or an earlier step
    of the mini-batch counts. ``empty``: the contribution has no weight.
    """

    worker: int
    at_s: float = 0.0
    loss: float | None = None
    last: bool = False
    empty: bool = False


@dataclass(frozen=True, slots=True)
class Waiting:
    """The worker waits for something other than its release (a barrier, the end of an epoch).

    The policy must not wait for it until its next push.
    """

    worker: int


@dataclass(frozen=True, slots=True)
class Left:
    """The worker is gone for good, and what it had not pushed is lost."""

    worker: int


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The time of the last ``SetTimer`` is reached."""

    at_s: float


Fact = Began | Joined | Ready | Pushed | Waiting | Left | TimerFired


@dataclass(frozen=True, slots=True)
class Apply:
    """Merge these workers' contributions with all held ones, and step the masters once."""

    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Hold these workers' contributions for the next update, so that they can be released."""

    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """Discard these workers' contributions."""

    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Let these workers continue from the current master parameters."""

    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReleaseThenApply:
    """Let these workers continue from the masters as they are, and apply their contributions then.

    They compute the next gradient while the update is made.
    """

    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Request a ``TimerFired`` at this time. Replaces an earlier request."""

    at_s: float


Order = Apply | Accumulate | Drop | Release | ReleaseThenApply | SetTimer
