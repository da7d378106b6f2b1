"""Steps on the masters that a worker makes without the server: counted at once, reported later.

Each worker counts its steps in shared memory; the total is the sum. A worker reports several steps
in one message, so that neither side wakes up for each. If the worker is lost, the server reads its
unreported steps from shared memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from hybridtrain.engine.memory import Store
from hybridtrain.engine.protocol.messages import Draw, DrawnBatch, MadeStep, Push
from hybridtrain.engine.worker.makers.logged_steps import LoggedSteps
from hybridtrain.engine.worker.makers.maker import Maker
from hybridtrain.engine.worker.pending_push import PendingPush, Taking

AT_ONCE = 16  # mini-batches drawn together, while plenty are left
_TELL_S = 0.05  # report at least so often, while steps are made
_MOST = 64  # unreported steps


class InPlaceMaker(Maker):
    """Each worker steps the masters: in place without a lock, where the exchange says so.

    Args:
        worker: its number.
        store: its counters count the steps of all.
        log: of a run that is recorded or replayed.
    """

    counts = True

    def __init__(self, worker: int, store: Store, log: LoggedSteps | None = None) -> None:
        assert store.step_counts is not None, "steps are counted"
        super().__init__(log)
        self._worker, self._made, self._copies = worker, store.step_counts, store.private_parameters
        self._n_covered = 0  # finished mini-batches
        self._read_at = 0  # version of the parameters that this worker has read
        self.untold: list[MadeStep] = []
        self._then: Taking = lambda released: None
        self._told_at_s = 0.0

    @property
    def total(self) -> int:
        return self._made.total

    def asked(self, covers: int, version: int) -> None:
        self._n_covered += covers
        self._made.cover(self._worker, self._n_covered)
        self.read(version)

    def read(self, version: int) -> None:
        self._read_at = version if self._copies else self._made.total

    def count(self, push: Push, covers: Sequence[DrawnBatch], then: Taking) -> int:
        age = self._made.total - self._read_at
        self._n_covered += len(covers)
        self._made.make(self._worker, self._n_covered)
        made = MadeStep(
            optimizer=push.optimizer,
            weight=push.weight,
            row=push.row,
            changes=push.changes,
            samples=push.samples,
            writes=push.writes,
            fault=push.fault,
            covers=tuple(covers),
            loss=push.loss,
            age=age,
        )
        self.untold.append(made)
        self._then = then
        self._read_at = self._made.total
        return self._read_at

    @property
    def may_wait(self) -> bool:
        return time.monotonic() - self._told_at_s < _TELL_S

    @property
    def must_tell(self) -> bool:
        return len(self.untold) >= _MOST

    def forget(self) -> None:
        self.untold = []

    def tell(self, draws: tuple[Draw, ...]) -> tuple[MadeStep, PendingPush]:
        *former, last = self.untold
        self.untold, self._told_at_s = [], time.monotonic()
        push = replace(last, former=tuple(former), draws=draws)
        return push, PendingPush(self._then, [], draws, later=True, made=True)
