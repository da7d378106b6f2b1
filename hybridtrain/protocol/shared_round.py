"""A round that workers hold in shared memory: whoever comes last makes the update.

Theory of operation. A worker whose gradient lies in its row says so in its line, under a lock. Who
finds that all have come makes the update before it gives the lock back, and rings for the others;
no message is sent, and the server is not woken. It reads afterwards what was done.
Any round can be *called off*, also while some wait in it: then each sends its push as a message,
and the server does what it does without this module. So everything unusual is the server's: a
worker that is late, has nothing to give, changes its optimizer, or is gone.

The lock goes with the process that holds it (:mod:`hybridtrain.protocol.kernel_lock`). A worker
that dies while it makes an update leaves ``making`` behind and no lock; who finds that puts back
what was kept before the update began, so that an update is made whole or not at all.

Rounds are numbered by the version that they make. Behind one that was called off the server makes
some more, twice as many each time if somebody had come to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from hybridtrain.protocol.kernel_lock import KernelLock

_VERSION, _OFF, _MAKING, _MADE_AT, _USED, _NEXT, _GAP, _STEADY = range(8)
_ROUND, _TOKEN, _CAME_AT, _WAITED, _AWAITED, _WEIGHT, _SAMPLES, _ALL_SAMPLES = range(8)
_LINE = 8  # words, which is a cache line: the first is of all, the others are one worker's each
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
        return self._words[_VERSION] >= number

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
            self._count(line)
            words[_VERSION] = number
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
        words[_OFF], words[_NEXT], words[_STEADY] = number, number + 1 + gap, 0

    def _count(self, last: int) -> None:
        """The update is made, by the worker of line ``last``, for which the others have waited."""
        words, figures, now = self._words, self._figures, time.monotonic_ns()
        for line in self._lines:
            figures[line + _ALL_SAMPLES] += figures[line + _SAMPLES]
            waited = now - words[line + _CAME_AT]
            words[line + _WAITED] += waited
            words[last + _AWAITED] += waited if line != last else 0
        words[_MADE_AT] = now

    @property
    def _is_torn(self) -> bool:
        """Under the lock: whoever has begun an update is gone."""
        return self._words[_MAKING] > self._words[_VERSION]

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

    def call_off_next(self, version: int, restore: Callable[[], object], for_s: float) -> None:
        """For the server: somebody is gone, so no round behind this version, or one made since, is
        to be held here. It waits no longer than ``for_s`` seconds for an update under way.
        """
        with self._lock.within(for_s) as held:
            if held:
                self._call_off(max(version, self._words[_VERSION]) + 1, restore)

    def look(self, version: int) -> MadeRounds | None:
        """For the server, which knows of ``version`` updates: what was made since, if anything."""
        n = self._words[_VERSION] - version
        if n <= 0:
            return None
        words, figures = self._words, self._figures
        now = (
            [figures[line + _ALL_SAMPLES] for line in self._lines],
            [words[line + _WAITED] * _S for line in self._lines],
            [words[line + _AWAITED] * _S for line in self._lines],
        )
        since = [
            [new - old for new, old in zip(after, before, strict=True)]
            for after, before in zip(now, self._known, strict=True)
        ]
        self._known = [*now]
        return MadeRounds(n, words[_MADE_AT] * _S, *since)
