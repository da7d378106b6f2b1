"""The worker's part of rounds in shared memory: the last worker to arrive makes the update.

It runs the server's flat update (:mod:`hybridtrain.updates.flat`) on state in shared memory. After
a round of the server the state may have been replaced, so workers request it again.
"""

from __future__ import annotations

import pickle
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from hybridtrain.protocol.messages import Clip, Push
from hybridtrain.protocol.shared_round import Arrival, Met, SharedRound
from hybridtrain.updates.base import Contribution
from hybridtrain.updates.groups import Groups
from hybridtrain.worker.own_updates.borrowed_update import BorrowedUpdate, is_usual
from hybridtrain.worker.own_updates.logged_steps import LoggedSteps

PATIENCE_S = 0.1  # then the server makes the round, so that it knows who waits for whom


class Bells(Protocol):
    """How workers wake one another."""

    def ring(self) -> None:
        """Wake the other workers."""
        ...

    def wait(self, for_s: float) -> None:
        """Wait for a ring or a message of the server, at most ``for_s`` seconds."""
        ...


class RoundMaker:
    """Takes part in the shared rounds for one worker.

    Args:
        worker: its number.
        shared: the round.
        bells: wake the other workers.
        borrowed: steps the masters.
        log: of a run that is recorded or replayed.
    """

    def __init__(
        self,
        worker: int,
        shared: SharedRound,
        bells: Bells,
        borrowed: BorrowedUpdate,
        log: LoggedSteps | None = None,
    ) -> None:
        self.optimizer = 0  # the number of the only one
        self.shared, self.bells = shared, bells
        self.borrowed, self._log = borrowed, log
        self._worker = worker
        self._weights: Sequence[float] = ()
        self._contributions: list[Contribution] = []
        self._clip: Clip | None = None
        self._came_s = 0.0
        self._owed: Groups | None = None  # changed hyper-parameters, not sent to the server yet
        self._coming: Groups | None = None  # those of this round, owed once it is made here

    def come(self, push: Push, number: int, whole: bool) -> bool:
        """Arrive in this round with the gradient in the row; False: send the push instead.

        ``whole``: all workers train.
        """
        self._settle()
        borrowed = self.borrowed
        if borrowed.never or not self.shared.may_come(number):
            return self._stay_away()
        if self._log is not None and not self._log.admits(push, number):
            return self._stay_away()
        if not (whole and is_usual(push) and borrowed.ready() and self._takes(push)):
            borrowed.server_steps()
            self.leave(number)
            return False
        samples = push.weight if push.samples is None else push.samples
        told = (push.changes.groups, push.clip)
        token = zlib.crc32(pickle.dumps(told)) if told != (None, None) else 0
        self._clip = push.clip
        if self.shared.is_first(number):
            borrowed.lent.keep()
        arrival = Arrival(push.weight, samples, token)
        if self._log is not None:
            self._log.write(number)
        self._came_s = time.monotonic()
        met = self.shared.come(self._worker, number, arrival, self._step)
        if met is Met.CALLED_OFF:
            self.leave(number)
        elif met is Met.MADE:
            self.bells.ring()
        if self._log is not None and met is not Met.CALLED_OFF:
            self._log.made()
        return met is not Met.CALLED_OFF

    def _stay_away(self) -> bool:
        """The server makes this round, and may replace the state; returns False."""
        self.borrowed.give_up()
        self.borrowed.server_steps()
        return False

    def _takes(self, push: Push) -> bool:
        """Set the push's hyper-parameters; False if they need another state."""
        groups = push.changes.groups
        takes = self.borrowed.takes(groups)
        if takes and groups is not None:
            self._coming = groups
        return takes

    def is_made(self, number: int, disturbed: Callable[[], bool]) -> bool:
        """Wait for the round, after arriving; False: it is left to the server."""
        until_s = time.monotonic() + PATIENCE_S
        while not self.shared.is_made(number):
            if self.shared.is_off(number):
                return False
            if time.monotonic() > until_s or disturbed():
                with suppress(BlockingIOError):
                    if self.leave(number, waits=False):
                        return False
            self.bells.wait(PATIENCE_S)
        if self._log is not None:
            self._log.goes_on()
        return True

    def left(self, push: Push) -> Push:
        """The push of a round that was left to the server while this worker waited."""
        return replace(push, waited_s=time.monotonic() - self._came_s)

    def leave(self, number: int, waits: bool = True) -> bool:
        """Leave this round to the server and wake the others; False if it is made already.

        Raises:
            BlockingIOError: if a worker makes it now and ``waits`` is false.
        """
        if not self.shared.call_off(number, self._restore, waits):
            return False
        self.borrowed.give_up()
        if not self.shared.is_first(number):
            self.bells.ring()
        return True

    def _restore(self) -> None:
        self.borrowed.lent.restore()  # a torn round means that all have arrived with the state

    def _settle(self) -> None:
        """The previous round is made: its hyper-parameters are owed."""
        self._owed, self._coming = _merged(self._owed, self._coming), None

    def owed(self, made: bool = True) -> Groups | None:
        """Take the changed hyper-parameters that the server does not know; the caller sends them.

        ``made``: this round is made here; else its push carries its own.
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
