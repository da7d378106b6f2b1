"""The contract of a policy."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from hybridtrain.events import Fact, Order


@runtime_checkable
class Policy(Protocol):
    """A pure state machine: facts in, orders out, in the order in which they are to be done.

    ``lockstep`` says what the rest of the system may rely on. True: nobody computes while an update
    is applied, so workers read the master parameters in place and take fixed, equal shares of every
    epoch. False: workers run freely, each on its own copy of the parameters, and draw mini-batches
    from one shared queue.
    """

    @property
    def lockstep(self) -> bool: ...

    def on(self, fact: Fact) -> list[Order]:
        """Take one fact, return the orders that follow from it."""
        ...
