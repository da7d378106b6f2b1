"""Faults on purpose: which there are, and when they happen.

A fault is a line of configuration, ``{worker: 1, step: 20, kind: kill}``, so that any continuous
integration can test what a run survives. This file reads such lines and schedules them;
:mod:`hybridtrain.lightning.fault_injection.in_worker` carries them out.

A worker counts its optimizer steps from 0, and a worker that takes the place of a dead one goes on
counting. A fault at a step happens once, at the first occasion from that step on (the first
validation, the first checkpoint), also where the worker has been replaced since. A fault with a
``rate`` may happen at every occasion, with that probability, drawn from ``seed``: the same faults
whenever all workers take the same steps.
"""

from __future__ import annotations

import math
import random
import struct
import sys
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

from hybridtrain.errors import UserError
from hybridtrain.util.anonymous_files import SharedBytes
from hybridtrain.util.option_types import (
    Natural,
    Positive,
    Range,
    check_fields,
    check_names,
    hint,
    shown,
)

PHASES = ("compute", "push", "update", "pull", "validation", "checkpoint", "teardown")
_IN_WORKERS = tuple(phase for phase in PHASES if phase != "update")
# What may happen, and in which phases.
KINDS: dict[str, tuple[str, ...]] = {
    "kill": PHASES,
    "hang": PHASES,
    "exit": _IN_WORKERS,
    "exception": _IN_WORKERS,
    "oom": _IN_WORKERS,
    "slow": ("compute",),
    "nan": ("compute",),
    "corrupt_gradient": ("compute",),
    "lose_data_loader": ("compute", "validation"),
}
FACTORS = {"slow": 3.0, "corrupt_gradient": -1000.0}  # if none is given


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault to inject: its kind, the worker, and the moment.

    Args:
        kind: what goes wrong.
        worker: its number; ``None``: any worker, each at random.
        step: of that worker, from 0.
        phase: of that step.
        rate: instead of ``step``: the probability, each time that the phase comes.
        seed: of these draws.
        factor: ``slow``: how much longer a step takes; ``corrupt_gradient``: what it is multiplied
            with.
        steps: ``slow``: for so many steps. At a step for all that follow, at random for one.

    Raises:
        UserError: if that makes no sense.
    """

    kind: str
    worker: Natural | None = None
    step: Natural | None = None
    phase: str = "compute"
    rate: Annotated[float, Range(0, 1, "(")] | None = None
    seed: Natural = 0
    factor: Annotated[float, Range(-sys.float_info.max)] | None = None
    steps: Positive | None = None

    def __post_init__(self) -> None:
        check_fields(self, "faults: ")
        _check_words(self)
        _check_when(self)
        _check_strength(self)

    @property
    def strength(self) -> float:
        """The factor, or its default."""
        return FACTORS.get(self.kind, 1.0) if self.factor is None else self.factor

    def __str__(self) -> str:
        who = "a worker" if self.worker is None else f"worker {self.worker}"
        when = f"rate {self.rate:g}" if self.step is None else f"step {self.step}"
        return f"{self.kind} of {who} in {self.phase}, {when}"


def _refuse(fault: Fault, what: str, how: str) -> UserError:
    given = {f.name: getattr(fault, f.name) for f in fields(fault)}
    shown = ", ".join(f"{k}: {v}" for k, v in given.items() if v != _DEFAULTS.get(k, ""))
    return UserError(f"faults: {{{shown}}} was given{what}; {how}")


_DEFAULTS = {f.name: f.default for f in fields(Fault)}


def _check_words(fault: Fault) -> None:
    for name, word, known in (("kind", fault.kind, KINDS), ("phase", fault.phase, PHASES)):
        if word not in known:
            how = f"{name} must be one of {', '.join(known)}"
            raise _refuse(fault, hint(word, known), how)
    if fault.phase not in KINDS[fault.kind]:
        allowed = ", ".join(KINDS[fault.kind])
        raise _refuse(fault, "", f"{fault.kind} can happen in {allowed}")


def _check_when(fault: Fault) -> None:
    if (fault.step is None) == (fault.rate is None):
        what = " without a step or a rate" if fault.step is None else " with a step and a rate"
        raise _refuse(fault, what, "say when: step: 20, or rate: 0.01 (at random, each time)")
    if fault.rate is None and fault.worker is None:
        raise _refuse(fault, " without a worker", "say whose: worker: 1")


def _check_strength(fault: Fault) -> None:
    if fault.factor is not None and fault.kind not in FACTORS:
        raise _refuse(fault, "", f"only {' and '.join(FACTORS)} take a factor")
    if fault.kind == "slow" and fault.strength <= 1:
        raise _refuse(fault, "", "factor must be above 1 for slow")
    if fault.steps is not None and fault.kind != "slow":
        raise _refuse(fault, "", "only slow takes steps")


def read_faults(given: Any) -> tuple[Fault, ...]:
    """Parse a user's list of mappings or faults.

    Raises:
        UserError: if one makes no sense.
    """
    if given is None:
        return ()
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
        raise UserError(
            f"faults={shown(given)} was given; it must be a list, as in "
            "faults=[{worker: 1, step: 20, kind: kill}]"
        )
    return tuple(each if isinstance(each, Fault) else _read(each) for each in given)


def _read(given: Any) -> Fault:
    if not isinstance(given, Mapping) or "kind" not in given:
        raise UserError(
            f"faults: {shown(given)} was given; a fault is a mapping with a kind "
            f"({', '.join(KINDS)}), as in {{worker: 1, step: 20, kind: kill}}"
        )
    check_names("faults: ", given, [f.name for f in fields(Fault)])
    return Fault(**given)


def check_workers(faults: Sequence[Fault], n_workers: int) -> None:
    """Check that the workers of all faults exist.

    Raises:
        UserError: if not.
    """
    for fault in faults:
        if fault.worker is not None and fault.worker >= n_workers:
            there = "the only one is 0" if n_workers == 1 else f"there are 0 to {n_workers - 1}"
            raise _refuse(fault, "", f"there is no worker {fault.worker}; {there}")


# ---- what has happened ---------------------------------------------------------------------------

_CELL = struct.Struct("<qd")  # how often it has happened, and when last
_COUNTERS = struct.Struct("<qq")  # a worker's steps and its process; as long as a cell


class FaultLog(SharedBytes):
    """Counts the faults so far, in memory that the parent and all workers share.

    A worker about to die sends no message, and the process that replaces it must not die of the
    same fault. The parent makes the log; copies in other processes map the same memory.

    Args:
        n_faults: F.
        n_workers: W.
    """

    def __init__(self, n_faults: int, n_workers: int) -> None:
        self.n_faults, self.n_workers = n_faults, n_workers
        super().__init__(n_workers * (1 + n_faults) * _CELL.size)

    def _place(self, worker: int, fault: int = -1) -> int:
        """Where the cell of a fault lies; before its cells lie the counters of the worker."""
        return _CELL.size * (worker * (1 + self.n_faults) + 1 + fault)

    def count(self, fault: int, worker: int) -> int:
        """How often the worker has had the fault."""
        return int(_CELL.unpack_from(self.map, self._place(worker, fault))[0])

    def when_s(self, fault: int, worker: int) -> float:
        """When it last had it, on the monotonic clock of this host."""
        return float(_CELL.unpack_from(self.map, self._place(worker, fault))[1])

    def happens(self, fault: int, worker: int) -> None:
        """Count the fault, now."""
        place = self._place(worker, fault)
        _CELL.pack_into(self.map, place, self.count(fault, worker) + 1, time.monotonic())

    def progress(self, worker: int) -> tuple[int, int]:
        """Number of the worker's steps, and its process id."""
        steps, pid = _COUNTERS.unpack_from(self.map, self._place(worker))
        return int(steps), int(pid)

    def reach(self, worker: int, steps: int, pid: int) -> None:
        """Store the number of the worker's steps, and its process id."""
        _COUNTERS.pack_into(self.map, self._place(worker), steps, pid)


class Schedule:
    """Decides which faults of one worker are due.

    Args:
        faults: of all workers.
        worker: its number.
        fault_log: counts the faults.
        kinds: of the faults to consider.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        worker: int,
        fault_log: FaultLog,
        kinds: Container[str] = KINDS,
    ) -> None:
        self._worker, self._fault_log = worker, fault_log
        self._born = fault_log.progress(worker)[0]  # the first step of this process
        numbered = enumerate(faults)
        mine = [(n, f) for n, f in numbered if f.worker in (None, worker) and f.kind in kinds]
        self._of: dict[str, list[tuple[int, Fault]]] = {
            phase: [each for each in mine if each[1].phase == phase] for phase in PHASES
        }
        self._left = {n: self._drawn(n, f) for n, f in mine if f.rate is not None}

    def _drawn(self, number: int, fault: Fault) -> int:
        """Draw the number of occasions until the fault happens next.

        Each process of the worker draws anew: waiting again for the number that an earlier process
        drew could postpone a rare fault forever.
        """
        assert fault.rate is not None, "only these are drawn"
        count = self._fault_log.count(number, self._worker)
        stream = (fault.seed, number, self._worker, count, self._born)
        chance = random.Random(repr(stream)).random()
        if fault.rate == 1:
            return 1
        occasions = math.log1p(-chance) / math.log1p(-fault.rate)
        return 1 + int(min(occasions, sys.maxsize))

    def has(self, *phases: str) -> bool:
        """Whether a fault may happen in one of these phases."""
        return any(self._of[phase] for phase in phases)

    def due(self, phase: str, step: int) -> Iterator[Fault]:
        """Yield the faults due now; each is counted before it is yielded."""
        for number, fault in self._of[phase]:
            if fault.step is not None:
                ready = step >= fault.step and not self._fault_log.count(number, self._worker)
            else:
                self._left[number] -= 1
                ready = self._left[number] <= 0
            if ready:
                self._fault_log.happens(number, self._worker)
                if fault.rate is not None:
                    self._left[number] = self._drawn(number, fault)
                yield fault


def happened(faults: Sequence[Fault], fault_log: FaultLog) -> list[dict[str, Any]]:
    """The faults that each worker had: how often, and when last (seconds, monotonic clock)."""
    rows = []
    for number, fault in enumerate(faults):
        for worker in range(fault_log.n_workers):
            if count := fault_log.count(number, worker):
                row = {"kind": fault.kind, "phase": fault.phase, "worker": worker}
                rows.append({**row, "count": count, "last_s": fault_log.when_s(number, worker)})
    return rows
