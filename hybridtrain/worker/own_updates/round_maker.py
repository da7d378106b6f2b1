"""A worker's side of rounds in shared memory: it comes, and makes the update if it is the last.

The update is the server's own (:mod:`hybridtrain.updates.flat`), with its state where all can map
it. After any round that the server has made, the state may be another, and is borrowed anew.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Sequence
from typing import Protocol

from hybridtrain.memory import Store
from hybridtrain.protocol.messages import Clip, Push
from hybridtrain.protocol.shared_round import Arrival, Met, SharedRound
from hybridtrain.server.shared_parameters import round_of
from hybridtrain.updates.contribution import Contribution
from hybridtrain.updates.groups import Groups
from hybridtrain.worker.own_updates.borrowed_update import BorrowedUpdate, Found, Stepped, is_usual

PATIENCE_S = 0.1  # then the server is to know who waits for whom


class Bells(Protocol):
    """How workers that meet wake one another."""

    def ring(self) -> None:
        """For all others."""
        ...

    def wait(self, for_s: float) -> None:
        """Until somebody has rung, or the server has said something; not longer than so."""
        ...


class RoundMaker:
    """Of one worker.

    Args:
        worker: its number.
        shared: the round.
        bells: the others hear of a round by these.
        borrowed: what steps the masters.
    """

    def __init__(
        self, worker: int, shared: SharedRound, bells: Bells, borrowed: BorrowedUpdate
    ) -> None:
        self.optimizer = 0  # the number of the only one
        self.shared, self.bells = shared, bells
        self.borrowed = borrowed
        self._worker = worker
        self._weights: Sequence[float] = ()
        self._contributions: list[Contribution] = []
        self._clip: Clip | None = None
        self._owed: Groups | None = None  # what the server has not heard of hyper-parameters,
        self._coming: Groups | None = None  # and what it is to hear if this round is made here

    @classmethod
    def of(
        cls, worker: int, bells: Bells | None, store: Store, stepped: Stepped, found: Found
    ) -> RoundMaker | None:
        """For this worker, where all may meet; the others as in :class:`BorrowedUpdate`."""
        shared = round_of(store)
        if shared is None or bells is None:
            return None
        return cls(worker, shared, bells, BorrowedUpdate(store, stepped, found))

    def come(self, push: Push, number: int, whole: bool) -> bool:
        """To this round, with a gradient that lies in the row; else the push is to be sent.

        ``whole``: all workers are there.
        """
        self._settle()
        borrowed = self.borrowed
        if borrowed.never or not self.shared.may_come(number):
            borrowed.give_up()
            borrowed.server_steps()
            return False
        if not (whole and is_usual(push) and borrowed.ready() and self._takes(push)):
            borrowed.server_steps()
            self.leave(number)
            return False
        samples = push.weight if push.samples is None else push.samples
        told = push.groups is not None or push.clip is not None
        token = zlib.crc32(pickle.dumps((push.groups, push.clip))) if told else 0
        self._clip = push.clip
        if self.shared.is_first(number):
            borrowed.lent.keep()
        arrival = Arrival(push.weight, samples, token)
        met = self.shared.come(self._worker, number, arrival, self._step)
        if met is Met.CALLED_OFF:
            self.leave(number)
        elif met is Met.MADE:
            self.bells.ring()
        return met is not Met.CALLED_OFF

    def _takes(self, push: Push) -> bool:
        """Whether the hyper-parameters are such that the state is the same; they are known then."""
        takes = self.borrowed.takes(push.groups)
        if takes and push.groups is not None:
            self._coming = push.groups
        return takes

    def leave(self, number: int, waits: bool = True) -> bool:
        """The server makes this round, unless it is made here already; who waits in it hears of it.

        Raises:
            BlockingIOError: if somebody makes it now, and the caller does not want to wait.
        """
        if not self.shared.call_off(number, self._restore, waits):
            return False
        self.borrowed.give_up()
        if not self.shared.is_first(number):
            self.bells.ring()
        return True

    def _restore(self) -> None:
        self.borrowed.lent.restore()  # all who come have it, and all have come

    def _settle(self) -> None:
        """The round before is made."""
        self._owed, self._coming = _merged(self._owed, self._coming), None

    def owed(self, made: bool = True) -> Groups | None:
        """All that the server has not been told; it is told now.

        ``made``: this round is made here, or else its push tells of itself.
        """
        if not made:
            self._coming = None
        self._settle()
        owed, self._owed = self._owed, None
        return owed

    def _step(self, weights: Sequence[float]) -> None:
        if weights != self._weights:
            total = sum(weights)
            self._weights = weights
            self._contributions = [
                Contribution(worker, weight / total) for worker, weight in enumerate(weights)
            ]
        self.borrowed.step(self._contributions, self._clip)


def _merged(before: Groups | None, after: Groups | None) -> Groups | None:
    if before is None or after is None:
        return after if before is None else before
    return tuple({**old, **new} for old, new in zip(before, after, strict=True))
