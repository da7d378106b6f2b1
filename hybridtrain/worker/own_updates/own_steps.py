"""Steps on the masters that a worker makes without the server: counted at once, reported later.

Each worker counts its steps in shared memory; the total is the sum. A worker reports several steps
in one message, so that neither side wakes up for each. If the worker is lost, the server reads its
unreported steps from shared memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from hybridtrain.memory import Store
from hybridtrain.memory.counters import MadeSteps
from hybridtrain.protocol.messages import Draw, DrawnBatch, MadeStep, Push
from hybridtrain.worker.pending_push import PendingPush, Taking

AT_ONCE = 16  # mini-batches drawn together, while plenty are left
_TELL_S = 0.05  # report at least so often, while steps are made
_MOST = 64  # unreported steps


class OwnSteps:
    """The steps of one worker.

    Args:
        worker: its number.
        made: counts the steps of all.
        copies: the worker computes with a copy, not with the masters themselves.
    """

    def __init__(self, worker: int, made: MadeSteps, copies: bool = False) -> None:
        self.made = made
        self._worker, self._copies = worker, copies
        self._n_covered = 0  # finished mini-batches
        self._read_at = 0  # version of the parameters that this worker has read
        self._untold: list[MadeStep] = []
        self._then: Taking = lambda released: None
        self._told_at_s = 0.0

    @classmethod
    def of(cls, worker: int, store: Store) -> OwnSteps | None:
        """For this worker, if workers make steps."""
        return cls(worker, store.made, store.private_parameters) if store.made else None

    def asked(self, covers: int, version: int) -> None:
        """The server has counted a step, which covers so many mini-batches."""
        self._n_covered += covers
        self.made.cover(self._worker, self._n_covered)
        self.read(version)

    def read(self, version: int) -> None:
        """The server has updated the worker's parameters to this version."""
        self._read_at = version if self._copies else self.made.total

    def make(self, push: Push, covers: Sequence[DrawnBatch], then: Taking) -> int:
        """Count a step made without the server; returns the number of steps of all workers."""
        age = self.made.total - self._read_at
        self._n_covered += len(covers)
        self.made.make(self._worker, self._n_covered)
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
        self._untold.append(made)
        self._then = then
        self._read_at = self.made.total
        return self._read_at

    @property
    def untold(self) -> bool:
        """Whether some steps are not reported."""
        return bool(self._untold)

    @property
    def may_wait(self) -> bool:
        """Whether the last report was recent."""
        return time.monotonic() - self._told_at_s < _TELL_S

    @property
    def must_tell(self) -> bool:
        """Whether so many steps are unreported that the worker must wait for the last answer."""
        return len(self._untold) >= _MOST

    def forget(self) -> None:
        """This worker has failed: the server counts its steps from shared memory."""
        self._untold = []

    def tell(self, draws: tuple[Draw, ...]) -> tuple[MadeStep, PendingPush]:
        """Report all steps: the push to send, and its pending answer."""
        *former, last = self._untold
        self._untold, self._told_at_s = [], time.monotonic()
        push = replace(last, former=tuple(former), draws=draws)
        return push, PendingPush(self._then, [], draws, later=True, made=True)
