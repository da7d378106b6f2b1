"""A lock-step round in shared memory: the last worker to arrive makes the update.

Theory of operation. A worker whose gradient lies in its row registers in its line, under a lock.
The last one makes the update before it releases the lock, and wakes the others; no message is sent,
and the server reads the counts later.
Any round can be *called off*, also while workers wait in it: each then sends its push, and the
server makes the update as without this module. So the server handles everything unusual: a worker
that is late, has no gradient, changes its optimizer, or is gone.

The kernel releases the lock of a dead process (:mod:`hybridtrain.engine.protocol.kernel_lock`). A
worker that dies during an update leaves the word ``_MAKING`` set; the next holder of the lock
restores the backup made before the update, so that an update is made whole or not at all. There are
two sets of counts: one write of ``_MADE`` names the newest round and its set, and the next round
writes to the other set.

A round's number is the version that it makes. After an aborted round the server makes the next 2
updates itself, then 4, 8, … up to 1,024 if a worker had already arrived.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import NamedTuple

from hybridtrain.engine.protocol.kernel_lock import Frees, KernelLock

# _MADE: 2 * newest round, + 1 if its counts are in the second set. _MADE_AT and the counts of
# _COUNTS have two sets.
_MADE, _OFF, _MAKING, _USED, _NEXT, _GAP, _STEADY, _MADE_AT = range(8)
_ROUND, _TOKEN, _CAME_AT, _WEIGHT, _SAMPLES, _COUNTS = range(6)
_ALL_SAMPLES, _WAITED, _AWAITED, _N_COUNTS = range(4)
_LINE = 16  # words, two cache lines: the first line is common, then one per worker
_FEWEST, _MOST = 2, 1024  # rounds that the server makes after one that was called off
_ENOUGH = 32  # consecutive rounds after which that number begins at _FEWEST again
_S = 1e-9  # times are in nanoseconds


class ArrivalResult(Enum):
    """The outcome of a worker's arrival."""

    WAITS = auto()  # for other workers
    MADE = auto()  # it was the last, and has made the update
    CALLED_OFF = auto()  # it must send its push to the server


class Arrival(NamedTuple):
    """``weight`` and ``samples`` as in :class:`hybridtrain.engine.protocol.messages.Push`;
    ``token``: a hash of the hyper-parameters; if it differs between workers, the round is called
    off.
    """

    weight: float
    samples: float
    token: int = 0


class MadeRounds(NamedTuple):
    """Rounds that the workers completed without the server; samples and seconds by worker.

    ``n``: their number; ``at_s``: the time of the last; ``awaited_s``: how long others waited for
    the worker.
    """

    n: int
    at_s: float
    samples: Sequence[float]
    waited_s: Sequence[float]
    awaited_s: Sequence[float]


class SharedRound:
    """One per run, shared by its workers and the server.

    Args:
        words: (:meth:`n_words`,) int64 in shared memory, zero at first.
        n_workers: W.
        fd: the file that holds the words; its first byte is locked.
    """

    def __init__(self, words: memoryview, n_workers: int, fd: int) -> None:
        self._words, self._figures = words, words.cast("B").cast("d")
        self._lines = [_LINE * (1 + worker) for worker in range(n_workers)]
        self._lock = KernelLock(fd)
        self._known = [[0.0] * n_workers for _ in (_ALL_SAMPLES, _WAITED, _AWAITED)]

    @classmethod
    def n_words(cls, n_workers: int) -> int:
        """How many words there must be."""
        return _LINE * (n_workers + 1)

    @property
    def used(self) -> bool:
        """Whether a worker has ever arrived."""
        return bool(self._words[_USED])

    def is_made(self, number: int) -> bool:
        """Whether the update of this round, or of a later one, is made."""
        return self._words[_MADE] >= 2 * number

    @property
    def _version(self) -> int:
        return self._words[_MADE] >> 1

    def is_off(self, number: int) -> bool:
        """Whether this round is called off."""
        return self._words[_OFF] >= number

    def may_come(self, number: int) -> bool:
        """Whether workers may try this round; if not, the server makes it."""
        return self._words[_NEXT] <= number

    def is_first(self, number: int) -> bool:
        """Whether no worker has arrived in this round."""
        return all(self._words[line + _ROUND] != number for line in self._lines)

    def come(
        self,
        worker: int,
        number: int,
        arrival: Arrival,
        make: Callable[[Sequence[float]], object],
    ) -> ArrivalResult:
        """Register the worker's gradient; the last worker calls ``make`` with all weights."""
        words, figures, line = self._words, self._figures, self._lines[worker]
        with self._lock.held():
            if words[_OFF] >= number or self._is_torn:
                return ArrivalResult.CALLED_OFF
            words[_USED], words[line + _TOKEN] = 1, arrival.token
            words[line + _CAME_AT] = time.monotonic_ns()
            figures[line + _WEIGHT], figures[line + _SAMPLES] = arrival.weight, arrival.samples
            words[line + _ROUND] = number
            if any(words[each + _ROUND] != number for each in self._lines):
                return ArrivalResult.WAITS
            if len({words[each + _TOKEN] for each in self._lines}) > 1:
                self._put_off(number)
                return ArrivalResult.CALLED_OFF
            words[_MAKING] = number
            make([figures[each + _WEIGHT] for each in self._lines])
            words[_MADE] = 2 * number + self._count(line)
            words[_STEADY] += 1
            if words[_STEADY] >= _ENOUGH:
                words[_GAP] = _FEWEST
        return ArrivalResult.MADE

    def _put_off(self, number: int) -> None:
        """Under the lock: leave this round and some more to the server."""
        words = self._words
        if words[_OFF] >= number:
            return
        gap = max(words[_GAP], _FEWEST)
        if not self.is_first(number):
            words[_GAP] = min(2 * gap, _MOST)
        words[_NEXT], words[_STEADY], words[_OFF] = number + 1 + gap, 0, number

    def _count(self, last: int) -> int:
        """Count the update, made by the worker of line ``last``, for which the others have waited.

        Returns which set holds the new counts.
        """
        words, figures, now = self._words, self._figures, time.monotonic_ns()
        side = 1 - words[_MADE] % 2
        new, old = _COUNTS + _N_COUNTS * side, _COUNTS + _N_COUNTS * (1 - side)
        waited = [now - words[line + _CAME_AT] for line in self._lines]
        for line, waited_ns in zip(self._lines, waited, strict=True):
            samples = figures[line + old + _ALL_SAMPLES] + figures[line + _SAMPLES]
            figures[line + new + _ALL_SAMPLES] = samples
            words[line + new + _WAITED] = words[line + old + _WAITED] + waited_ns
            others = sum(waited) - waited_ns if line == last else 0
            words[line + new + _AWAITED] = words[line + old + _AWAITED] + others
        words[_MADE_AT + side] = now
        return side

    @property
    def _is_torn(self) -> bool:
        """Under the lock: a worker has died during an update."""
        return self._words[_MAKING] > self._version

    def call_off(self, number: int, restore: Callable[[], object], waits: bool = True) -> bool:
        """Leave this round to the server; returns whether it was not made yet.

        ``restore`` restores the backup if a worker has died during the update.

        Raises:
            BlockingIOError: if a worker makes an update now and ``waits`` is false.
        """
        with self._lock.held(waits):
            return self._call_off(number, restore)

    def _call_off(self, number: int, restore: Callable[[], object]) -> bool:
        """Under the lock."""
        if self.is_made(number):
            return False
        if self._is_torn:
            restore()
            self._words[_MAKING] = 0
        self._put_off(number)
        return True

    def call_off_next(self, version: int, restore: Callable[[], object], frees: Frees) -> None:
        """By the server, after the loss of a worker: call off the round after this version, or
        after a newer one.
        """
        with self._lock.seized(frees):
            self._call_off(max(version, self._version) + 1, restore)

    def free(self, frees: Frees) -> None:
        """By the server: free the lock if a worker was stopped during an update."""
        with self._lock.seized(frees):
            pass

    def look(self, version: int) -> MadeRounds | None:
        """By the server, which knows of ``version`` updates: the rounds made since, if any."""
        words, figures, made = self._words, self._figures, -1
        while made != words[_MADE]:  # else a worker may have written during the reading
            made = words[_MADE]
            if made >> 1 <= version:
                return None
            lines = [line + _COUNTS + _N_COUNTS * (made % 2) for line in self._lines]
            now = (
                [figures[line + _ALL_SAMPLES] for line in lines],
                [words[line + _WAITED] * _S for line in lines],
                [words[line + _AWAITED] * _S for line in lines],
            )
            at_s = words[_MADE_AT + made % 2] * _S
        since = [
            [new - old for new, old in zip(after, before, strict=True)]
            for after, before in zip(now, self._known, strict=True)
        ]
        self._known = [*now]
        return MadeRounds((made >> 1) - version, at_s, *since)
