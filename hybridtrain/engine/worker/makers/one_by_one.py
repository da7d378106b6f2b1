"""The worker's part of updates made one by one: it applies its own gradient without the server.

It runs the server's flat update (:mod:`hybridtrain.engine.updates.flat`) on state in shared memory,
under a lock (:mod:`hybridtrain.engine.protocol.locked_steps`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hybridtrain.engine.memory import Store
from hybridtrain.engine.protocol.locked_steps import Tried
from hybridtrain.engine.protocol.messages import Clip, Push
from hybridtrain.engine.server.shared_parameters import locked_steps_of
from hybridtrain.engine.updates.base import Contribution
from hybridtrain.engine.worker.makers.borrowed_update import BorrowedUpdate, is_plain
from hybridtrain.engine.worker.makers.in_place import InPlaceMaker
from hybridtrain.engine.worker.makers.logged_steps import LoggedSteps
from hybridtrain.engine.worker.makers.maker import Covers

_PATIENCE_S = 0.1  # for another worker's update; then the server makes this one


class OneByOneMaker(InPlaceMaker):
    """Each worker makes the update of its own gradient, under a lock.

    Args:
        worker: its number.
        store: the shared rows.
        borrowed: steps the masters.
        log: of a run that is recorded or replayed.
    """

    makes_alone = True

    def __init__(
        self, worker: int, store: Store, borrowed: BorrowedUpdate, log: LoggedSteps | None = None
    ) -> None:
        super().__init__(worker, store, log)
        self.borrowed, self._locked, self._generation = borrowed, locked_steps_of(store), -1
        self._contribution = [Contribution(worker, 1.0)]
        own = store.copies[worker]
        self._rows = [(own[dtype], masters) for dtype, masters in store.masters.items()]

    def begin(self, last: int | None) -> None:
        self.borrowed.begin()
        self._locked.end_at(last)

    def timed(self) -> list[tuple[object, str, str]]:
        return [(self, "_step", "own update")]

    def make(self, push: Push, covers: Covers) -> int | None:
        borrowed = self.borrowed
        if push.changes.members is not None:
            borrowed.begin()
        admitted, groups = self.log.admits(push, self.total + 1), push.changes.groups
        if not (admitted and is_plain(push) and self._is_ready() and borrowed.takes(groups)):
            borrowed.server_steps()
            return None
        step = partial(self._step, push.clip, partial(self._count, push, covers))
        tried = self._try(step)
        if tried is Tried.OUTDATED:
            borrowed.give_up()
            tried = self._try(step) if self._is_ready() else Tried.LEFT
        if tried is not Tried.MADE:
            return None
        self.log.made()
        self.log.goes_on()
        return self._read_at

    def _is_ready(self) -> bool:
        generation = self._locked.generation  # read first: never newer than the state
        if not self.borrowed.is_here:
            self._generation = generation
        return self.borrowed.ready()

    def _try(self, step: Callable[[], object]) -> Tried:
        return self._locked.make(self._generation, self.borrowed.lent.keep, step, _PATIENCE_S)

    def _step(self, clip: Clip | None, count: Callable[[], object]) -> None:
        self.borrowed.step(self._contribution, clip)
        for own, masters in self._rows:
            own.copy_(masters)
        self.log.write(self.total + 1)
        count()

    def _count(self, push: Push, covers: Covers) -> None:
        self.count(push, covers(), lambda released: None)
