"""Decide which workers hang, and whether the run is deadlocked; no processes here.

Theory of operation. A worker's life is a sequence of *stretches*: from one sign of life (a
heartbeat, or a message) to the next. A worker that waits for a reply cannot hang; the one it waits
for may. A stretch is measured in looks, at least one a second.

The limit of a stretch is learnt per worker and activity from the longest one so far. A first time
(the first step, which compiles; the first validation; the first checkpoint) gets the timeout of
torch's process groups. A limit given by the user is used as it is, except until a worker's first
step has ended; and a first time may always take some seconds, because modules are imported then.

Two causes of delay do not count: a pause of the watching process itself (Ctrl-Z, a frozen
container, swapping), so a look adds little more than the interval between looks; and the time that
a worker waits for a core.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import Any

from hybridtrain.util.anonymous_files import anonymous_descriptor

# ---- A worker's signs of life, in memory shared with the process that watches it ----------------
# Theory of operation. Every worker shares one anonymous page of memory with its parent and writes
# there what it is doing and how often it has begun to. That takes three stores, no system call and
# no clock, so it is cheap enough for every mini-batch. The parent looks about once a second: a
# worker hangs if it neither waits for a reply nor has beaten or sent a message for much longer than
# this activity has ever taken (:class:`HangDetector`).
#
# After these numbers the same file holds the worker's stacks, which :mod:`faulthandler` writes on a
# signal. Its handler is in C, so it works whatever the interpreter is blocked in.

_PAGE_BYTES = mmap.PAGESIZE
_ASK: int | None = getattr(signal, "SIGRTMAX", None)  # real-time signals are unused; not on macOS
STACKS_SIGNAL = None if _ASK is None else int(_ASK) - 3


class Doing(IntEnum):
    """A worker's activity, from one heartbeat to the next."""

    STARTING = 0
    STEP = 1
    BETWEEN = 2
    EVALUATION = 3
    EPOCH = 4
    CHECKPOINT = 5
    ENDING = 6

    def __str__(self) -> str:
        return _IN_WORDS[self]


_IN_WORDS = {
    Doing.STARTING: "starting up",
    Doing.STEP: "in a training step",
    Doing.BETWEEN: "between mini-batches (data, callbacks)",
    Doing.EVALUATION: "in an evaluation step",
    Doing.EPOCH: "at the beginning or end of an epoch or of a validation",
    Doing.CHECKPOINT: "saving a checkpoint",
    Doing.ENDING: "ending",
}


# 0: the activity, 1: number of beats, 2: whether it waits, from here on: beats per activity
_FIRST = 3
_N_BYTES = 8 * (_FIRST + len(Doing))


class Heartbeat:
    """The shared page; the worker writes it, the parent reads it.

    Args:
        fd: of a file made by :func:`heartbeat_file`; this object owns it. ``None``: not watched.
    """

    def __init__(self, fd: int | None = None) -> None:
        self._fd = fd
        self._map = None if fd is None else mmap.mmap(fd, _PAGE_BYTES)
        self._numbers = memoryview(self._map or bytearray(_N_BYTES)).cast("q")
        self.failed_in = ""  # the activity in which the worker's code raised

    # ---- the worker's side ----------------------------------------------------------------------

    def beat(self, doing: Doing) -> None:
        """The worker begins this activity."""
        numbers = self._numbers
        numbers[0] = doing
        numbers[1] += 1
        numbers[_FIRST + doing] += 1

    def wait_for_mates(self, waits: bool) -> None:
        """The worker waits, or no longer does, for others of its host, without the server."""
        self._numbers[2] = waits

    def fail(self) -> None:
        """The worker's code has raised; keep the activity in which it did."""
        self.failed_in = self.failed_in or self.where

    def tell_stacks(self) -> None:
        """Let the parent ask for this process' stacks by a signal."""
        if STACKS_SIGNAL is not None and self._fd is not None:
            faulthandler.register(STACKS_SIGNAL, self._fd, all_threads=True, chain=False)

    def fall_silent(self) -> None:
        """In a process forked from the worker: stop writing to the shared page."""
        self._numbers = memoryview(bytearray(_N_BYTES)).cast("q")

    # ---- the parent's side ----------------------------------------------------------------------

    @property
    def doing(self) -> Doing:
        """The current activity."""
        return Doing(self._numbers[0])

    @property
    def beats(self) -> int:
        """Number of beats so far."""
        return self._numbers[1]

    @property
    def waits(self) -> bool:
        """Whether the worker waits for others of its host."""
        return bool(self._numbers[2])

    def begun(self, doing: Doing) -> int:
        """How often the worker has begun this activity."""
        return self._numbers[_FIRST + doing]

    @property
    def where(self) -> str:
        """The current activity in words."""
        doing = self.doing
        step = f"in its training step {self.begun(doing)}"
        return step if doing == Doing.STEP else str(doing)

    def forget_stacks(self) -> None:
        """Discard stacks written before."""
        assert self._fd is not None, "it is watched"
        os.ftruncate(self._fd, _PAGE_BYTES)
        os.lseek(self._fd, _PAGE_BYTES, os.SEEK_SET)  # shared with the worker: one file description

    def stacks(self) -> str:
        """The stacks that the worker has written so far."""
        assert self._fd is not None, "it is watched"
        length = os.fstat(self._fd).st_size - _PAGE_BYTES
        return os.pread(self._fd, max(0, length), _PAGE_BYTES).decode(errors="replace")

    def close(self) -> None:
        """Give everything back."""
        self._numbers.release()
        if self._map is not None:
            self._map.close()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def heartbeat_file() -> int:
    """An anonymous file for one worker's page and stacks; returns its descriptor."""
    fd = anonymous_descriptor()
    os.ftruncate(fd, _PAGE_BYTES)
    return fd


_FACTOR = 20.0  # times the longest stretch of the same activity
_QUICK_S, _PATIENT_S = 300.0, 1800.0  # least limit of steps, of all else
STEPS = (Doing.STEP, Doing.EVALUATION)
_FIRST_S = 10.0  # least limit of an activity's first time
_START_TIMES, _START_S = 10.0, 60.0  # times the given limit, and at least, until a first step ends
_WARN_AT = 0.5  # of the limit
_AWAITED_S = 60.0  # warn after this while other workers wait
_NOBODY: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class HangTimeout:
    """How long a worker may show no sign of life; ``None``: learnt from earlier stretches."""

    given_s: float | None = None

    @classmethod
    def of(cls, value: Any) -> HangTimeout | None:
        """``"auto"``, or seconds; ``None`` waits for ever."""
        if value is None:
            return None
        return cls() if value == "auto" else cls(float(value))

    def limit_s(self, sign: Sign, longest_s: float) -> float:
        """Limit of the current stretch; the longest of its activity so far took ``longest_s``."""
        if self.given_s is not None:
            if not sign.trained:
                return max(self.given_s * _START_TIMES, _START_S)
            return max(self.given_s, _FIRST_S) if sign.nth <= 1 else self.given_s
        if sign.nth <= 1:
            return _PATIENT_S
        least_s = _QUICK_S if sign.doing in STEPS else _PATIENT_S
        return max(least_s, _FACTOR * longest_s)

    def early_s(self, limit_s: float, longest_s: float, awaited: bool) -> float:
        """When to warn of a long stretch; earlier if other workers wait (``awaited``)."""
        early_s = _WARN_AT * limit_s
        if self.given_s is not None or not awaited:
            return early_s
        return min(early_s, max(_AWAITED_S, 2 * longest_s))

    @property
    def interval_s(self) -> float:
        """Seconds between two looks."""
        return 1.0 if self.given_s is None else min(1.0, self.given_s / 8)


@dataclass(frozen=True, slots=True)
class Sign:
    """A worker's state at one look.

    ``waits``: for a reply; ``doing``: its activity, for the ``nth`` time; ``beats``: heartbeats and
    messages so far; ``trained``: its first step, of training or evaluation, has ended.
    """

    pid: int
    waits: bool
    doing: Doing
    beats: int
    nth: int = 2
    trained: bool = True

    @classmethod
    def of(cls, pid: int, waits: bool, heard: int, heartbeat: Heartbeat) -> Sign:
        """The state now; ``heard``: messages received from it."""
        doing = heartbeat.doing
        trained = any(heartbeat.begun(each) > (each == doing) for each in STEPS)
        return cls(pid, waits, doing, heartbeat.beats + heard, heartbeat.begun(doing), trained)


@dataclass(frozen=True, slots=True)
class Silent:
    """A worker without a sign of life for ``for_s``, in an activity for the ``nth`` time.

    ``longest_s``: its longest stretch of that activity so far; ``hung``: over ``limit_s``.
    """

    worker: int
    doing: Doing
    nth: int
    for_s: float
    limit_s: float
    longest_s: float
    hung: bool


@dataclass(slots=True)
class _Account:
    sign: Sign
    silent_s: float = 0.0
    warned: bool = False
    longest_s: dict[Doing, float] = field(default_factory=dict)  # without each activity's first

    def remember(self) -> None:
        """The stretch has ended."""
        doing = self.sign.doing
        if self.sign.nth > 1:
            self.longest_s[doing] = max(self.silent_s, self.longest_s.get(doing, 0.0))


class HangDetector:
    """Measures the stretches of all workers.

    Args:
        patience: the limit of a stretch.
    """

    def __init__(self, patience: HangTimeout) -> None:
        self.patience = patience
        self._accounts: dict[int, _Account] = {}
        self._last_s: float | None = None

    def look(
        self, now_s: float, signs: Mapping[int, Sign], starved_s: Mapping[int, float] = _NOBODY
    ) -> list[Silent]:
        """Look at all running workers; returns those to warn of or to kill.

        ``starved_s``: seconds since the last look that a worker has waited for a core.
        """
        passed_s = 0.0 if self._last_s is None else now_s - self._last_s
        passed_s = min(passed_s, 2 * self.patience.interval_s)
        self._last_s = now_s
        for worker in self._accounts.keys() - signs.keys():
            del self._accounts[worker]
        awaited = any(sign.waits for sign in signs.values())
        found = []
        for worker, sign in signs.items():
            own_s = max(0.0, passed_s - starved_s.get(worker, 0.0))
            found.append(self._one(worker, sign, own_s, awaited))
        return [each for each in found if each is not None]

    def excuse(self, worker: int) -> None:
        """The worker has a good reason: restart its stretch without another warning."""
        if (account := self._accounts.get(worker)) is not None:
            account.silent_s = 0.0

    def _one(self, worker: int, sign: Sign, passed_s: float, awaited: bool) -> Silent | None:
        account = self._accounts.get(worker)
        if account is None or account.sign.pid != sign.pid:  # another process in its place
            account = self._accounts[worker] = _Account(sign)
        if sign != account.sign:
            account.remember()
            account.sign, account.silent_s, account.warned = sign, 0.0, False
        elif not sign.waits:
            account.silent_s += passed_s
        return self._judged(worker, account, awaited)

    def _judged(self, worker: int, account: _Account, awaited: bool) -> Silent | None:
        sign, for_s = account.sign, account.silent_s
        longest_s = account.longest_s.get(sign.doing, 0.0)
        limit_s = self.patience.limit_s(sign, longest_s)
        hung = for_s >= limit_s
        early_s = self.patience.early_s(limit_s, longest_s, awaited)
        if not hung and (account.warned or for_s < early_s):
            return None
        account.warned = True
        return Silent(worker, sign.doing, sign.nth, for_s, limit_s, longest_s, hung)


# ---- deadlock -----------------------------------------------------------------------------------

_DEADLOCK_S = 30.0
_TELLING_S = 600.0  # while a worker sends its training state, all but the weights of a model
_PAUSE_S = 2.0  # a longer one between looks is a pause of the watching process


@dataclass
class Standstill:
    """Detects a deadlock: every worker waits, and no event is due.

    The last resort: the server refuses what it sees to be stuck
    (:meth:`hybridtrain.engine.server.server.Server._free_the_stuck`), and the watchdog kills a
    worker that hangs. What is left are errors of this package, and such a run must end with an
    error.
    """

    for_s: float = 0.0  # how long nothing has happened
    _heard: int = -1
    _last_s: float | None = None

    def look(self, now_s: float, stands: bool, heard: int, telling: bool = False) -> bool:
        """Look at the run, about once a second; True: it is deadlocked.

        Args:
            now_s: by a monotonic clock.
            stands: every worker waits, and no event is due.
            heard: messages received from all workers so far.
            telling: a worker was asked for its training state.
        """
        passed_s = 0.0 if self._last_s is None else min(now_s - self._last_s, _PAUSE_S)
        self._last_s = now_s
        if not stands or heard != self._heard:
            self.for_s, self._heard = 0.0, heard
            return False
        self.for_s += passed_s
        return self.for_s >= (_TELLING_S if telling else _DEADLOCK_S)
