"""Steps on the masters that a worker makes itself, without asking: counted at once, told later.

How many steps there are stands in shared memory, where whoever wants the number adds up what each
worker has written. The server hears of several steps together, so that neither it nor the worker is
woken for each; what a worker has made and not told of, it sees in the same memory, should the
worker be lost.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from hybridtrain.memory import Store
from hybridtrain.memory.lending import MadeSteps
from hybridtrain.protocol.messages import Draw, DrawnBatch, Push
from hybridtrain.worker.pending_push import PendingPush, Taking

AT_ONCE = 16  # mini-batches that are drawn together, of many
_TELL_S = 0.05  # at least so often, while steps are made
_MOST = 64  # that are not told of


class OwnSteps:
    """Of one worker.

    Args:
        worker: its number.
        made: the steps of all.
        copies: the worker computes with what it has read last, not with the masters themselves.
    """

    def __init__(self, worker: int, made: MadeSteps, copies: bool = False) -> None:
        self.made = made
        self._worker, self._copies = worker, copies
        self._n_covered = 0  # mini-batches that are done
        self._read_at = 0  # steps behind the parameters, when this worker has read them
        self._untold: list[Push] = []
        self._then: Taking = lambda released: None
        self._told_at_s = 0.0

    @classmethod
    def of(cls, worker: int, store: Store) -> OwnSteps | None:
        """Of this worker, where workers make any."""
        return cls(worker, store.made, store.private_parameters) if store.made else None

    def asked(self, covers: int, version: int) -> None:
        """A step that the server has counted is made; with it so many mini-batches are done."""
        self._n_covered += covers
        self.made.cover(self._worker, self._n_covered)
        self.read(version)

    def read(self, version: int) -> None:
        """The server has brought the worker's parameters to this version."""
        self._read_at = version if self._copies else self.made.total

    def make(self, push: Push, covers: Sequence[DrawnBatch], then: Taking) -> int:
        """A step that nobody has asked for is made; returns how many all have made now."""
        age = self.made.total - self._read_at
        self._n_covered += len(covers)
        self.made.make(self._worker, self._n_covered)
        self._untold.append(replace(push, covers=tuple(covers), own=True, age=age, later=True))
        self._then = then
        self._read_at = self.made.total
        return self._read_at

    @property
    def untold(self) -> bool:
        """Whether the server does not know of some."""
        return bool(self._untold)

    @property
    def may_wait(self) -> bool:
        """Whether it need not be told now."""
        return time.monotonic() - self._told_at_s < _TELL_S

    @property
    def must_tell(self) -> bool:
        """Whether this worker is to wait until the server has heard what was told before."""
        return len(self._untold) >= _MOST

    def forget(self) -> None:
        """This worker has failed: the server counts what stands in shared memory, once."""
        self._untold = []

    def tell(self, draws: tuple[Draw, ...]) -> tuple[Push, PendingPush]:
        """All at once: what is to be said, and what becomes of the answer."""
        *former, last = self._untold
        self._untold, self._told_at_s = [], time.monotonic()
        push = replace(last, former=tuple(former), draws=draws)
        return push, PendingPush(self._then, [], draws, later=True, made=True)
