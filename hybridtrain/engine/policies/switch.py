"""One policy first, another one later.

Synchronous while the loss falls steeply, asynchronous afterwards, or the reverse (Sync-Switch: Li
et al. 2021, ICDCS, from BSP to ASP). At the switch the new policy receives the active workers and
the unanswered pushes as new facts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from hybridtrain.engine.policies.basic import LockFree
from hybridtrain.engine.policies.policy import Needs, Policy
from hybridtrain.engine.protocol.facts import (
    Accumulate,
    Apply,
    Began,
    Fact,
    Joined,
    Left,
    Order,
    Pushed,
    Release,
    Waiting,
)
from hybridtrain.errors import UserError
from hybridtrain.util.option_types import Checked, NotNegative, Positive


@dataclass
class Plateau:
    """Detects that the loss has stopped falling.

    Args:
        patience: pushes without a better mean loss.
        min_delta: the least improvement.
    """

    patience: int
    min_delta: float = 0.0
    _best: float = field(default=float("inf"), init=False, repr=False)
    _sum: float = field(default=0.0, init=False, repr=False)
    _count: int = field(default=0, init=False, repr=False)

    def reached(self, loss: float) -> bool:
        """Add a loss; whether the last ``patience`` losses have no better mean than before."""
        self._sum, self._count = self._sum + loss, self._count + 1
        if self._count < self.patience:
            return False
        mean = self._sum / self._count
        self._sum, self._count = 0.0, 0
        better = mean < self._best - self.min_delta
        self._best = mean
        return not better


@dataclass
class Switch(Checked):
    """Follow ``first`` until update number ``at_update``, or a plateau of the loss, then ``then``.

    Args:
        first: a policy.
        then: another.
        at_update: switch after so many updates, as the server counts them.
        patience: or when the mean loss of so many pushes does not improve on the best before.
        min_delta: the least improvement.

    Raises:
        UserError: if the parts do not fit, or not exactly one of both conditions was given.
    """

    first: Policy
    then: Policy
    at_update: Positive | None = None
    patience: Positive | None = None
    min_delta: NotNegative = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.at_update is None) == (self.patience is None):
            raise UserError(
                "switch needs either at_update=N (after so many updates) or patience=N (when the "
                f"loss has stopped falling for N pushes); at_update={self.at_update} and "
                f"patience={self.patience} were given"
            )

    def begin(self, n_workers: int) -> Needs:
        parts = {"first": self.first.begin(n_workers), "then": self.then.begin(n_workers)}
        for name, part in parts.items():
            alone = isinstance(getattr(self, name), Switch | LockFree)
            if part.turns or part.asks or part.delay or alone:
                raise UserError(
                    f"switch: {name}={getattr(self, name)} cannot be a part: choose policies that "
                    "wait for pushes and their updates (hybrid, backup, k_async, softsync, ssp, "
                    "async)"
                )
        self._now, self._n, self._updates, self._due = self.first, n_workers, 0, False
        self._plateau = Plateau(self.patience, self.min_delta) if self.patience else None
        self._active: set[int] = set()
        self._waiting: dict[int, Pushed] = {}
        self._held = False  # gradients are accumulated for the next update
        self._rounds = all(part.whole_rounds for part in parts.values())  # each is an update
        at, early, late = self.at_update, parts["first"].gathers, parts["then"].gathers
        return Needs(
            whole_rounds=self._rounds,
            holds=any(part.holds for part in parts.values()),
            drops_late=any(part.drops_late for part in parts.values()),
            max_staleness=max(
                x.max_staleness if x.drops_late else math.inf for x in parts.values()
            ),
            watches_loss=self.patience is not None,
            gathers=early if at is not None else min(early, late),
            later=(at, late) if at is not None else None,
        )

    def on(self, fact: Fact) -> Sequence[Order]:
        orders = list(self._now.on(fact))
        if self._now is self.then:
            return orders
        self._remember(fact, orders)
        return orders + self._switch() if self._due else orders

    def _remember(self, fact: Fact, orders: Sequence[Order]) -> None:
        match fact:
            case Began(version):
                self._updates = version
                self._due = self.at_update is not None and version >= self.at_update
            case Joined(worker):
                self._active.add(worker)
            case Pushed(worker, loss=loss, empty=empty):
                self._active.add(worker)
                self._waiting[worker] = fact
                if self._plateau is not None and loss is not None and not empty:
                    self._due = self._due or self._plateau.reached(loss)
            case Waiting(worker) | Left(worker):
                self._active.discard(worker)
                self._waiting.pop(worker, None)
        for order in orders:
            match order:
                case Accumulate(workers):
                    self._held = self._held or self._brought(workers)
                case Apply(workers):
                    self._updates += self._rounds or self._held or self._brought(workers)
                    self._held = False
                    self._due = self._due or self._updates == self.at_update
                case Release(workers):
                    for worker in workers:
                        self._waiting.pop(worker, None)

    def _brought(self, workers: Sequence[int]) -> bool:
        """Whether one of them has pushed a gradient."""
        return not all(self._waiting[worker].empty for worker in workers)

    def _switch(self) -> list[Order]:
        self._now = self.then
        self.then.begin(self._n)
        orders: list[Order] = []
        for worker in sorted(self._active):
            orders += self.then.on(Joined(worker))
        for push in list(self._waiting.values()):
            orders += self.then.on(push)
        return orders
