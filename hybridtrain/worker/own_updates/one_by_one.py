"""The worker's part of updates made one by one: it applies its own gradient without the server.

It runs the server's flat update (:mod:`hybridtrain.updates.flat`) on state in shared memory, under
a lock (:mod:`hybridtrain.protocol.locked_steps`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hybridtrain.memory import Store
from hybridtrain.protocol.locked_steps import LockedSteps, Tried
from hybridtrain.protocol.messages import Clip, Push
from hybridtrain.updates.base import Contribution
from hybridtrain.worker.own_updates.borrowed_update import BorrowedUpdate, is_usual

_PATIENCE_S = 0.1  # for another worker's update; then the server makes this one


class OwnUpdates:
    """Makes one worker's updates.

    Args:
        worker: its number.
        store: the shared rows.
        locked: the lock and the count.
        borrowed: steps the masters.
    """

    def __init__(
        self, worker: int, store: Store, locked: LockedSteps, borrowed: BorrowedUpdate
    ) -> None:
        self.borrowed = borrowed
        self._locked, self._generation = locked, -1
        self._contribution = [Contribution(worker, 1.0)]
        own = store.copies[worker]
        self._copies = [(own[dtype], masters) for dtype, masters in store.masters.items()]

    def begin(self, last: int | None) -> None:
        """The server has new optimizers. ``last``: after this version no update is made."""
        self.borrowed.begin()
        self._locked.last = last

    def make(self, push: Push, count: Callable[[], object]) -> bool:
        """Apply the gradient in the row and ``count`` the update; False: send the push instead.

        Afterwards the worker's parameters are those of its update.
        """
        borrowed = self.borrowed
        if push.members is not None:
            borrowed.begin()
        if not (is_usual(push) and self._is_ready() and borrowed.takes(push.groups)):
            borrowed.server_steps()
            return False
        tried = self._try(push, count)
        if tried is Tried.OUTDATED:
            borrowed.give_up()
            tried = self._try(push, count) if self._is_ready() else Tried.LEFT
        return tried is Tried.MADE

    def _is_ready(self) -> bool:
        generation = self._locked.generation  # read first: never newer than the state
        if not self.borrowed.is_here:
            self._generation = generation
        return self.borrowed.ready()

    def _try(self, push: Push, count: Callable[[], object]) -> Tried:
        step = partial(self._step, push.clip, count)
        return self._locked.make(self._generation, self.borrowed.lent.keep, step, _PATIENCE_S)

    def _step(self, clip: Clip | None, count: Callable[[], object]) -> None:
        self.borrowed.step(self._contribution, clip)
        for own, masters in self._copies:
            own.copy_(masters)
        count()
