"""The contract of a policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from hybridtrain.protocol.facts import Fact, Order


@dataclass(frozen=True, slots=True)
class Requirements:
    """What the rest of the system may rely on, and has to provide.

    ``lockstep``: nobody computes while an update is applied, and all workers step equally often; so
    they read the master parameters in place and take fixed, equal shares of every epoch. Else they
    compute on copies of their own and draw mini-batches from one shared queue. ``turns``: these are
    dealt to the workers in turn, and a worker asks before it begins one (``Ready``).
    ``holds``: contributions may be put aside (``Hold``), which takes one more row of gradients.
    ``drops_late``: what was begun before the last update will be dropped. ``watches_loss``: pushes
    are to tell the loss. ``lock_free``: workers write to the master parameters themselves.
    ``gathers``: contributions that make an update, as a rule; ``later``: after which update another
    number does, and which. Schedules are told by them how many updates there will be.
    """

    lockstep: bool
    turns: bool = False
    holds: bool = False
    drops_late: bool = False
    watches_loss: bool = False
    lock_free: bool = False
    gathers: int = 1
    later: tuple[int, int] | None = None


@runtime_checkable
class Policy(Protocol):
    """A pure state machine: facts in, orders out, in the order in which they are to be done."""

    def begin(self, n_workers: int) -> Requirements:
        """Forget everything; this many workers, numbered from 0, will join.

        Raises:
            UserError: if the policy makes no sense for so many.
        """
        ...

    def on(self, fact: Fact) -> Sequence[Order]:
        """Take one fact, return the orders that follow from it."""
        ...
