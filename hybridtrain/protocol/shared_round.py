"""A round that workers hold in shared memory: whoever comes last makes the update.

Theory of operation. A worker whose gradient lies in its row says so in its line, under a lock. Who
finds that all have come makes the update before it gives the lock back, and rings for the others;
no message is sent, and the server is not woken. It reads afterwards what was done.
Any round can be *called off*, also while some wait in it: then each sends its push as a message,
and the server does what it does without this module. So everything unusual is the server's: a
worker that is late, has nothing to give, changes its optimizer, or is gone.

The lock goes with the process that holds it (:mod:`hybridtrain.protocol.kernel_lock`). A worker
that dies while it makes an update leaves ``making`` behind and no lock; who finds that puts back
what was kept before the update began, so that an update is made whole or not at all. What is
counted of rounds stands there twice: one write says which is the newest round and where its counts
are, and the next round writes to the other place.

Rounds are numbered by the version that they make. Behind one that was called off the server makes
some more, twice as many each time if somebody had come to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from hybridtrain.protocol.kernel_lock import Frees, KernelLock

# _MADE: twice the newest round, and 1 if its counts are the second ones. Of words named last there
# are two sets.
_MADE, _OFF, _MAKING, _USED, _NEXT, _GAP, _STEADY, _MADE_AT = range(8)
_ROUND, _TOKEN, _CAME_AT, _WEIGHT, _SAMPLES, _COUNTS = range(6)
_ALL_SAMPLES, _WAITED, _AWAITED, _N_COUNTS = range(4)
_LINE = 16  # words, two cache lines: the first are of all, the others are one worker's each
_FEWEST, _MOST = 2, 1024  # rounds of the server behind one that was called off
_ENOUGH = 32  # rounds in a row, after which those called off before count no more
_S = 1e-9  # times are kept in nanoseconds


class Met(Enum):
    """What came of it that a worker has come to a round."""

    WAITS = auto()  # others have not come
    MADE = auto()  # it was the last, and has made the update
    CALLED_OFF = auto()  # the push is to be sent to the server


@dataclass(frozen=True, slots=True)
class Arrival:
    """``weight`` and ``samples`` as in :class:`hybridtrain.protocol.messages.Push`; ``token``: of
    what has to be the same for all, or the server is to see to it.
    """

    weight: float
    samples: float
    token: int = 0


@dataclass(frozen=True, slots=True)
class MadeRounds:
    """What the server has not heard of: rounds, and per worker samples and seconds.

    ``at_s``: when the last of them was made; ``awaited_s``: others have waited for the worker.
    """

    n: int
    at_s: float
    samples: Sequence[float]
    waited_s: Sequence[float]
    awaited_s: Sequence[float]


class SharedRound:
    """Of the workers of one run.

    Args:
        words: (:meth:`n_words`,) int64 in shared memory, zero at the beginning.
        n_workers: W.
        fd: of the file that they lie in; its first byte is locked.
    """

    def __init__(self, words: memoryview, n_workers: int, fd: int) -> None:
        self._words, self._figures = words, words.cast("B").cast("d")
        self._lines = [_LINE * (1 + worker) for worker in range(n_workers)]
        self._lock = KernelLock(fd)
        self._known = [[0.0] * n_workers for _ in (_ALL_SAMPLES, _WAITED, _AWAITED)]

    @classmethod
    def n_words(cls, n_workers: int) -> int:
        """So many there must be."""
        return _LINE * (n_workers + 1)

    @property
    def used(self) -> bool:
        """Whether anybody has ever come."""
        return bool(self._words[_USED])

    def is_made(self, number: int) -> bool:
        """Whether the update of this round, or a later one, is made."""
        return self._words[_MADE] >= 2 * number

    @property
    def _version(self) -> int:
        return self._words[_MADE] >> 1

    def is_off(self, number: int) -> bool:
        """Whether the pushes of this round are the server's."""
        return self._words[_OFF] >= number

    def may_come(self, number: int) -> bool:
        """Whether it is time to try; if not, this round is the server's."""
        return self._words[_NEXT] <= number

    def is_first(self, number: int) -> bool:
        """Whether nobody has come to this round."""
        return all(self._words[line + _ROUND] != number for line in self._lines)

    def come(
        self,
        worker: int,
        number: int,
        arrival: Arrival,
        make: Callable[[Sequence[float]], object],
    ) -> Met:
        """The worker's gradient lies in its row; the last one calls ``make`` with all weights."""
        words, figures, line = self._words, self._figures, self._lines[worker]
        with self._lock.held():
            if words[_OFF] >= number or self._is_torn:
                return Met.CALLED_OFF
            words[_USED], words[line + _TOKEN] = 1, arrival.token
            words[line + _CAME_AT] = time.monotonic_ns()
            figures[line + _WEIGHT], figures[line + _SAMPLES] = arrival.weight, arrival.samples
            words[line + _ROUND] = number
            if any(words[each + _ROUND] != number for each in self._lines):
                return Met.WAITS
            if len({words[each + _TOKEN] for each in self._lines}) > 1:
                self._put_off(number)
                return Met.CALLED_OFF
            words[_MAKING] = number
            make([figures[each + _WEIGHT] for each in self._lines])
            words[_MADE] = 2 * number + self._count(line)
            words[_STEADY] += 1
            if words[_STEADY] >= _ENOUGH:
                words[_GAP] = _FEWEST
        return Met.MADE

    def _put_off(self, number: int) -> None:
        """Under the lock: the server makes this round, and some more."""
        words = self._words
        if words[_OFF] >= number:
            return
        gap = max(words[_GAP], _FEWEST)
        if not self.is_first(number):
            words[_GAP] = min(2 * gap, _MOST)
        words[_NEXT], words[_STEADY], words[_OFF] = number + 1 + gap, 0, number

    def _count(self, last: int) -> int:
        """The update is made, by the worker of line ``last``, for which the others have waited.

        Returns which of both places has the counts with it.
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
        """Under the lock: whoever has begun an update is gone."""
        return self._words[_MAKING] > self._version

    def call_off(self, number: int, restore: Callable[[], object], waits: bool = True) -> bool:
        """Have the server make this round, unless it is made; whether it is the server's.

        ``restore`` puts back what was kept, where somebody is gone in the middle of the update.

        Raises:
            BlockingIOError: if somebody makes an update now, and the caller does not want to wait.
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
        """For the server: somebody is gone, so no round behind this version, or one made since, is
        to be held here.
        """
        with self._lock.seized(frees):
            self._call_off(max(version, self._version) + 1, restore)

    def free(self, frees: Frees) -> None:
        """For the server: no worker is in the middle of an update for long."""
        with self._lock.seized(frees):
            pass

    def look(self, version: int) -> MadeRounds | None:
        """For the server, which knows of ``version`` updates: what was made since, if anything."""
        words, figures, made = self._words, self._figures, -1
        while made != words[_MADE]:  # or a worker may write where this reads
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
