"""The contract of a policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from hybridtrain.protocol.facts import Fact, Order


@dataclass(frozen=True, slots=True)
class Needs:
    """What a policy relies on.

    ``whole_rounds``: nobody computes while an update is applied, and all workers step equally
    often. ``turns``: one worker computes at a time; it asks before it begins a mini-batch
    (``Ready``). ``asks``: each does so before its first one only. ``free``: whoever pushes is
    released at once, and what was pushed is an update. ``everyone``: an update is of one
    contribution of each worker, and nothing is remembered from one to the next, so a round to which
    all have come need not be told of. ``holds``: contributions may
    be put aside (``Accumulate``), which takes one more row of gradients. ``drops_late``: what was
    begun before the last update will be dropped.
    ``watches_loss``: pushes are to tell the loss.
    ``gathers``: contributions that make an update, as a rule; ``later``: after which update another
    number does, and which. Schedules are told by them how many updates there will be.
    """

    whole_rounds: bool
    turns: bool = False
    holds: bool = False
    drops_late: bool = False
    watches_loss: bool = False
    gathers: int = 1
    later: tuple[int, int] | None = None
    asks: bool = False
    free: bool = False
    everyone: bool = False


@runtime_checkable
class Policy(Protocol):
    """A pure state machine: facts in, orders out, in the order in which they are to be done."""

    def begin(self, n_workers: int) -> Needs:
        """Forget everything; this many workers, numbered from 0, will join.

        Raises:
            UserError: if the policy makes no sense for so many.
        """
        ...

    def on(self, fact: Fact) -> Sequence[Order]:
        """Take one fact, return the orders that follow from it."""
        ...
