"""Warm start: one worker alone makes the first updates.

Dean et al., *Large Scale Distributed Deep Networks*, NIPS 2012, section 4.1: training is more
stable if it begins with a single replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hybridtrain.engine.policies.policy import Needs, Policy
from hybridtrain.engine.protocol.facts import (
    Apply,
    Began,
    Fact,
    Joined,
    Left,
    Order,
    Pushed,
    Ready,
    Release,
    Waiting,
)
from hybridtrain.util.option_types import Checked, Positive

FIRST = 0  # the worker that begins


@dataclass
class WarmStart(Checked):
    """An asynchronous policy whose first updates worker 0 makes alone.

    The other workers wait before their first mini-batch; the wrapped policy learns of them when
    they begin, at the latest when worker 0 waits (validation, end of its epoch) or is lost.

    Args:
        policy: the wrapped policy.
        updates: number of updates of worker 0 alone.
    """

    policy: Policy
    updates: Positive

    def begin(self, n_workers: int) -> Needs:
        self._open, self._made = False, 0
        self._free: set[int] = set()  # have begun
        self._held: set[int] = set()  # wait before their first mini-batch
        # Worker 0's updates are counted here, so the server must see each before the next.
        return replace(self.policy.begin(n_workers), asks=True, free=False)

    def on(self, fact: Fact) -> Sequence[Order]:
        match fact:
            case Ready(worker) if self._open or worker == FIRST:
                return self._let_in([worker])
            case Ready(worker):
                self._held.add(worker)
                return ()
            case Began(version):
                self._made = version
                return (*self.policy.on(fact), *self._open_if(version >= self.updates))
            case Pushed(empty=empty):
                orders = self.policy.on(fact)
                self._made += 0 if empty else sum(isinstance(order, Apply) for order in orders)
                return (*orders, *self._open_if(self._made >= self.updates))
            case Left(worker):
                self._held.discard(worker)
                orders = self.policy.on(fact) if worker in self._free else ()
                return (*orders, *self._open_if(worker == FIRST))
            case Waiting(worker) | Joined(worker) if worker in self._free:
                orders = self.policy.on(fact)
                return (*orders, *self._open_if(isinstance(fact, Waiting) and worker == FIRST))
            case Waiting() | Joined():
                return ()
        return self.policy.on(fact)

    def _open_if(self, over: bool) -> Sequence[Order]:
        """If the warm start is over, release the waiting workers."""
        if self._open or not over:
            return ()
        self._open = True
        held, self._held = sorted(self._held), set()
        return self._let_in(held)

    def _let_in(self, workers: Sequence[int]) -> Sequence[Order]:
        orders: list[Order] = []
        for worker in workers:
            self._free.add(worker)
            orders += [*self.policy.on(Joined(worker)), Release((worker,))]
        return orders
