"""Decide which workers hang, and whether the run is deadlocked; no processes here.

Theory of operation. A worker's life is a sequence of *stretches*: from one sign of life (a
:mod:`hybridtrain.monitoring.heartbeat`, or a message) to the next. A worker that waits for a reply
cannot hang; the one it waits for may. A stretch is measured in looks, at least one a second.

The limit of a stretch is learnt per worker and activity from the longest one so far. A first time
(the first step, which compiles; the first validation; the first checkpoint) gets the timeout of
torch's process groups. A limit given by the user is used as it is, except until a worker's first
step has ended; and a first time may always take some seconds, because modules are imported then.

Two causes of delay do not count: a pause of the watching process itself (Ctrl-Z, a frozen
container, swapping), so a look adds little more than the interval between looks; and the time that
a worker waits for a core.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from hybridtrain.monitoring.heartbeat import Doing, Heartbeat

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
    (:meth:`hybridtrain.server.server.Server._free_the_stuck`), and the watchdog kills a worker that
    hangs. What is left are errors of this package, and such a run must end with an error.
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
