"""The worker's part of updates made one by one: it applies its own gradient without the server.

It runs the server's flat update (:mod:`hybridtrain.updates.flat`) on state in shared memory, under
a lock (:mod:`hybridtrain.protocol.locked_steps`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hybridtrain.memory import Store
from hybridtrain.protocol.locked_steps import Tried
from hybridtrain.protocol.messages import Clip, Push
from hybridtrain.server.shared_parameters import locked_steps_of
from hybridtrain.updates.base import Contribution
from hybridtrain.worker.own_updates.borrowed_update import BorrowedUpdate, is_usual
from hybridtrain.worker.own_updates.logged_steps import LoggedSteps

_PATIENCE_S = 0.1  # for another worker's update; then the server makes this one


class OwnUpdates:
    """Makes one worker's updates.

    Args:
        worker: its number.
        store: the shared rows.
        borrowed: steps the masters.
        log: of a run that is recorded or replayed.
    """

    def __init__(
        self, worker: int, store: Store, borrowed: BorrowedUpdate, log: LoggedSteps | None = None
    ) -> None:
        assert store.made is not None, "steps are counted"
        self.borrowed, self._log = borrowed, log
        self._locked, self._made, self._generation = locked_steps_of(store), store.made, -1
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
        borrowed, log = self.borrowed, self._log
        if push.changes.members is not None:
            borrowed.begin()
        if log is not None and not log.admits(push, self._made.total + 1):
            borrowed.server_steps()
            return False
        if not (is_usual(push) and self._is_ready() and borrowed.takes(push.changes.groups)):
            borrowed.server_steps()
            return False
        tried = self._try(push.clip, count)
        if tried is Tried.OUTDATED:
            borrowed.give_up()
            tried = self._try(push.clip, count) if self._is_ready() else Tried.LEFT
        if log is not None and tried is Tried.MADE:
            log.made()
            log.goes_on()
        return tried is Tried.MADE

    def _is_ready(self) -> bool:
        generation = self._locked.generation  # read first: never newer than the state
        if not self.borrowed.is_here:
            self._generation = generation
        return self.borrowed.ready()

    def _try(self, clip: Clip | None, count: Callable[[], object]) -> Tried:
        step = partial(self._step, clip, count)
        return self._locked.make(self._generation, self.borrowed.lent.keep, step, _PATIENCE_S)

    def _step(self, clip: Clip | None, count: Callable[[], object]) -> None:
        self.borrowed.step(self._contribution, clip)
        for own, masters in self._copies:
            own.copy_(masters)
        if self._log is not None:
            self._log.write(self._made.total + 1)
        count()
