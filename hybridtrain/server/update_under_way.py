"""An update that is not over yet, and what stands behind it.

Theory of operation. A policy's orders are obeyed in their order. If an update does not end at once
(:class:`hybridtrain.updates.Pending`), the orders after it wait, and so do those that follow from
later facts: the policy hears of these at once, as if the update had been made. When the world says
that the update has ended (``UpdateEnded``), the rest is obeyed, up to the next one that takes long.

A worker that is lost meanwhile: its part of the update under way counts, because that has been
read; what it has pushed and is part of an update further behind does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hybridtrain.protocol.facts import Order, SetTimer
from hybridtrain.protocol.messages import Push
from hybridtrain.updates import Pending


@dataclass
class UpdateUnderWay:
    """One update of several optimizers, of which some are not done.

    Args:
        ticket: its number; that of an update which nobody waits for any more is not used again.
        pushes: that it is made of.
        counted: whose contributions have counted with the optimizers that are done.
        steps: of the others, and who has pushed for each.
    """

    ticket: int
    pushes: Mapping[int, Push]
    counted: list[int]
    steps: list[tuple[Mapping[int, Push], Pending]]
    behind: list[Order] = field(default_factory=list)

    def has(self, worker: int, push: Push) -> bool:
        """Whether this very push is part of the update."""
        return self.pushes.get(worker) is push

    def forget(self, worker: int) -> None:
        """The worker waits no more: orders that stand behind the update do not concern it."""
        kept = (_without(worker, order) for order in self.behind)
        self.behind = [order for order in kept if order is not None]


def _without(worker: int, order: Order) -> Order | None:
    """The order for the others, if it was not for this worker alone."""
    if isinstance(order, SetTimer) or worker not in order.workers:
        return order
    others = tuple(each for each in order.workers if each != worker)
    return replace(order, workers=others) if others else None
