"""Which workers hang: the decision, from signs of life and a clock. No processes here.

Theory of operation. A worker's life is a row of *stretches*: from one sign of life (a word on its
:mod:`hybridtrain.monitoring.heartbeat`, or a message) to the next. While a worker waits for an
answer it cannot hang; whoever it waits for may. The length of a stretch is measured in looks at it,
which come at least once a second, so the numbers are coarse: nobody is in a hurry here.

How long a stretch may be is learnt, worker by worker and kind by kind, from the longest so far.
What has not been seen before (the first step, which compiles; the first validation; the first
checkpoint) gets the time in which torch's own process groups would give up. A number given by the
user is used as it is, except before the end of a worker's first step; and what a worker does for
the first time may always take some seconds, as modules are imported then.

A pause of the watching process itself (Ctrl-Z, a container that is frozen, a machine that swaps)
is nobody's fault: a look counts for little more than the interval between looks. Nor is a machine
with more work than cores: what a worker waits for a core does not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from hybridtrain.monitoring.heartbeat import Doing, Heartbeat

_FACTOR = 20.0  # times the longest stretch of that kind
_QUICK_S, _PATIENT_S = 300.0, 1800.0
STEPS = (Doing.STEP, Doing.EVALUATION)  # the user's model computes, as it has done before
_FIRST_S = 10.0  # at least, for what is done for the first time
_START_TIMES, _START_S = 10.0, 60.0  # as long as given, and at least, until a first step is over
_WARN_AT = 0.5  # of what is allowed
_AWAITED_S = 60.0  # is long while others wait
_NOBODY: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class HangTimeout:
    """How long a worker may show no sign of life; ``None``: as its past says."""

    given_s: float | None = None

    @classmethod
    def of(cls, value: Any) -> HangTimeout | None:
        """``"auto"``, or seconds; ``None`` waits for ever."""
        if value is None:
            return None
        return cls() if value == "auto" else cls(float(value))

    def limit_s(self, sign: Sign, longest_s: float) -> float:
        """For the stretch that the worker is in; the longest of its kind took ``longest_s``."""
        if self.given_s is not None:
            if not sign.trained:
                return max(self.given_s * _START_TIMES, _START_S)
            return max(self.given_s, _FIRST_S) if sign.nth <= 1 else self.given_s
        if sign.nth <= 1:
            return _PATIENT_S
        least_s = _QUICK_S if sign.doing in STEPS else _PATIENT_S
        return max(least_s, _FACTOR * longest_s)

    def early_s(self, limit_s: float, longest_s: float, awaited: bool) -> float:
        """When to say that a stretch is long; earlier if the worker is ``awaited`` by others."""
        early_s = _WARN_AT * limit_s
        if self.given_s is not None or not awaited:
            return early_s
        return min(early_s, max(_AWAITED_S, 2 * longest_s))

    @property
    def interval_s(self) -> float:
        """Between two looks."""
        return 1.0 if self.given_s is None else min(1.0, self.given_s / 8)


@dataclass(frozen=True, slots=True)
class Sign:
    """What is seen of a worker.

    ``pid``: of its process; ``waits``: for an answer; ``doing``: what it does, for the ``nth``
    time; ``beats``: words and messages so far; ``trained``: a step, of training or of an
    evaluation, is over.
    """

    pid: int
    waits: bool
    doing: Doing
    beats: int
    nth: int = 2
    trained: bool = True

    @classmethod
    def of(cls, pid: int, waits: bool, heard: int, heartbeat: Heartbeat) -> Sign:
        """As it is now; ``heard`` counts messages."""
        doing = heartbeat.doing
        trained = any(heartbeat.begun(each) > (each == doing) for each in STEPS)
        return cls(pid, waits, doing, heartbeat.beats + heard, heartbeat.begun(doing), trained)


@dataclass(frozen=True, slots=True)
class Silent:
    """The worker shows no sign of life, in what it does for the ``nth`` time.

    ``longest_s``: it has ever been so long in that; ``hung``: for longer than is allowed.
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
    longest_s: dict[Doing, float] = field(default_factory=dict)  # but the first of each kind

    def remember(self) -> None:
        """This stretch is over."""
        doing = self.sign.doing
        if self.sign.nth > 1:
            self.longest_s[doing] = max(self.silent_s, self.longest_s.get(doing, 0.0))


class HangDetector:
    """Compares what is seen of the workers with what was seen before.

    Args:
        patience: how long a stretch may be.
    """

    def __init__(self, patience: HangTimeout) -> None:
        self.patience = patience
        self._accounts: dict[int, _Account] = {}
        self._last_s: float | None = None

    def look(
        self, now_s: float, signs: Mapping[int, Sign], starved_s: Mapping[int, float] = _NOBODY
    ) -> list[Silent]:
        """All who are there are looked at; returns those of whom there is something to say.

        ``starved_s``: for how long, since the last look, a worker has waited for a core.
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
        """It has a good reason; this stretch begins anew, and is not mentioned again."""
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
