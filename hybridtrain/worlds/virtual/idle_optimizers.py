"""Optimizers that move nothing, for runs in virtual time that only ask when they would step."""

from __future__ import annotations

from collections.abc import Mapping

from hybridtrain.protocol.messages import Push
from hybridtrain.updates import Pending
from hybridtrain.updates.groups import Members
from hybridtrain.updates.optimizer_set import Optimizers, Stepped


class IdleOptimizers(Optimizers):
    """One optimizer without parameters. Whatever is pushed is applied, at no cost.

    Args:
        timed: an update ends when the world says so.
    """

    under_way = None

    def __init__(self, timed: bool = False) -> None:
        super().__init__()
        self._timed = timed

    def objection(self, worker: int, push: Push) -> str | None:
        return None

    def members(self, worker: int, push: Push) -> Members:
        return ()

    def hear(self, worker: int, push: Push) -> None:
        """There is nothing to be told."""

    def hold(self, worker: int, push: Push) -> bool:
        return push.weight > 0

    def step(self, pushes: Mapping[int, Push], number: int | None = None) -> Stepped | Pending:
        stepped = Stepped(tuple([worker for worker, push in pushes.items() if push.weight > 0]))
        return Pending(lambda: stepped) if self._timed and stepped.workers else stepped
