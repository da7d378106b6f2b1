"""The worker's part of rounds in shared memory: the last worker to arrive makes the update.

It runs the server's flat update (:mod:`hybridtrain.engine.updates.flat`) on state in shared memory.
After a round of the server the state may have been replaced, so workers request it again.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from hybridtrain.engine.protocol.messages import Changed, Changes, Clip, Push
from hybridtrain.engine.protocol.shared_round import Arrival, ArrivalResult, SharedRound
from hybridtrain.engine.updates.base import Contribution
from hybridtrain.engine.updates.groups import Groups, in_words, merged
from hybridtrain.engine.worker.makers.borrowed_update import BorrowedUpdate, is_plain
from hybridtrain.engine.worker.makers.logged_steps import LoggedSteps
from hybridtrain.engine.worker.makers.maker import Maker
from hybridtrain.engine.worker.surroundings import Bells

PATIENCE_S = 0.1  # then the server makes the round, so that it knows who waits for whom


class LastWorkerMaker(Maker):
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
        super().__init__(log)
        self.shared, self.bells, self.borrowed = shared, bells, borrowed
        self._worker = worker
        self._weights: Sequence[float] = ()
        self._contributions: list[Contribution] = []
        self._clip: Clip | None = None
        self._hash: int | None = None  # a hash of the hyper-parameters
        self._came_s = 0.0
        self._owed: Groups | None = None  # changed hyper-parameters, not sent to the server yet
        self._coming: Groups | None = None  # those of this round, owed once it is made here

    def begin(self, last: int | None) -> None:
        self._hash = None
        self.borrowed.begin()

    def timed(self) -> list[tuple[object, str, str]]:
        return [(self, "_step", "update for all")]

    def come(self, push: Push, number: int, whole: bool) -> bool:
        self._settle()
        borrowed = self.borrowed
        may_come = not borrowed.never and self.shared.may_come(number)
        if not (may_come and self.log.admits(push, number)):
            return self._stay_away()
        if not (whole and is_plain(push) and borrowed.ready() and self._takes(push)):
            borrowed.server_steps()
            self._call_off(number)
            return False
        samples = push.weight if push.samples is None else push.samples
        self._clip = push.clip
        if self.shared.is_first(number):
            borrowed.lent.keep()
        self.log.write(number)
        self._came_s = time.monotonic()
        arrival = Arrival(push.weight, samples, self._token(push.changes.groups))
        met = self.shared.come(self._worker, number, arrival, self._step)
        if met is ArrivalResult.CALLED_OFF:
            self._call_off(number)
            return False
        if met is ArrivalResult.MADE:
            self.bells.ring()
        self.log.made()
        return True

    def _stay_away(self) -> bool:
        """The server makes this round, and may replace the state; returns False."""
        self._hash = None  # in all workers
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

    def _token(self, changes: Groups | None) -> int:
        """A hash of what the step follows: all hyper-parameters, then the changes since."""
        if self._hash is None:
            self._hash = zlib.crc32(in_words(self.borrowed.groups()).encode())
        elif changes is not None:
            self._hash = zlib.crc32(in_words(changes).encode(), self._hash)
        clip = self._clip
        return self._hash if clip is None else zlib.crc32(repr(clip).encode(), self._hash)

    def wait(self, push: Push, number: int, disturbed: Callable[[], bool]) -> Push | None:
        until_s = time.monotonic() + PATIENCE_S
        while not self.shared.is_made(number):
            if self.shared.is_off(number):
                return self._left(push)
            if time.monotonic() > until_s or disturbed():
                with suppress(BlockingIOError):
                    if self._call_off(number, waits=False):
                        return self._left(push)
            self.bells.wait(PATIENCE_S)
        self.log.goes_on()
        return None

    def leave(self, push: Push, number: int) -> Push | None:
        return self._left(push) if self._call_off(number) else None

    def _left(self, push: Push) -> Push:
        """The push of a round that was left to the server while this worker waited."""
        return replace(push, waited_s=time.monotonic() - self._came_s)

    def _call_off(self, number: int, waits: bool = True) -> bool:
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
        if self._coming is not None:
            self._owed, self._coming = merged(self._owed, self._coming), None

    def owed(self, made: bool) -> Changed | None:
        if not made:
            self._coming = None
        self._settle()
        owed, self._owed = self._owed, None
        return None if owed is None else Changed(0, Changes(owed))  # the only optimizer

    def _step(self, weights: Sequence[float]) -> None:
        if weights != self._weights:
            self._weights, total = weights, sum(weights)
            self._contributions = [Contribution(w, own / total) for w, own in enumerate(weights)]
        self.borrowed.step(self._contributions, self._clip)
