"""A worker's side of updates that are made one by one: it makes its own, without asking.

The update is the server's own (:mod:`hybridtrain.updates.flat`), with its state where all can map
it, and is made under a lock (:mod:`hybridtrain.protocol.locked_steps`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hybridtrain.memory import Store
from hybridtrain.protocol.locked_steps import LockedSteps, Tried
from hybridtrain.protocol.messages import Clip, Push
from hybridtrain.server.shared_parameters import locked_steps_of
from hybridtrain.updates.contribution import Contribution
from hybridtrain.worker.own_updates.borrowed_update import BorrowedUpdate, Found, Stepped, is_usual

_PATIENCE_S = 0.1  # with another worker's update; then the server is to see to it


class OwnUpdates:
    """Of one worker.

    Args:
        worker: its number.
        store: the shared rows.
        locked: who makes one, and how many there are.
        borrowed: what steps the masters.
    """

    def __init__(
        self, worker: int, store: Store, locked: LockedSteps, borrowed: BorrowedUpdate
    ) -> None:
        self.borrowed = borrowed
        self._locked, self._generation = locked, -1
        self._contribution = [Contribution(worker, 1.0)]
        own = store.copies[worker]
        self._copies = [(own[dtype], masters) for dtype, masters in store.masters.items()]

    @classmethod
    def of(cls, worker: int, store: Store, stepped: Stepped, found: Found) -> OwnUpdates | None:
        """For this worker, where all may make them; the others as in :class:`BorrowedUpdate`."""
        locked = locked_steps_of(store)
        if locked is None:
            return None
        return cls(worker, store, locked, BorrowedUpdate(store, stepped, found))

    def begin(self, last: int | None) -> None:
        """The server has got other optimizers. ``last``: behind this version no update is made."""
        self.borrowed.begin()
        self._locked.last = last

    def make(self, push: Push, count: Callable[[], object]) -> bool:
        """An update of the gradient in the row, and ``count`` it; else the push is to be sent.

        The worker's parameters are those behind its update.
        """
        borrowed = self.borrowed
        if not (is_usual(push) and self._is_ready() and borrowed.takes(push.groups)):
            borrowed.server_steps()
            return False
        tried = self._try(push, count)
        if tried is Tried.OUTDATED:
            borrowed.give_up()
            tried = self._try(push, count) if self._is_ready() else Tried.LEFT
        return tried is Tried.MADE

    def _is_ready(self) -> bool:
        generation = self._locked.generation  # not newer than what is borrowed now
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
