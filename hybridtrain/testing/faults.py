"""Faults on purpose: which there are, and when they happen.

A fault is a line of configuration, ``{worker: 1, step: 20, kind: kill}``, so that what a run is to
survive can be asked of it in anybody's continuous integration. This file reads such lines and says
when they are due; :mod:`hybridtrain.lightning.fault_injection.in_worker` carries them out.

A worker counts its optimizer steps from 0, and a worker that takes the place of a dead one goes on
counting. A fault at a step happens once, at the first occasion from that step on (the first
validation, the first checkpoint), also where the worker has been replaced since. A fault with a
``rate`` may happen at every occasion, with that probability, drawn from ``seed``: the same faults
whenever all workers take the same steps.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

from hybridtrain.errors import UserError
from hybridtrain.util.named_choice import hint
from hybridtrain.util.option_types import Natural, Positive, Range, check_fields

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
    """One of them.

    Args:
        kind: one of ``KINDS``.
        worker: whose; ``None``: anybody's, each at random.
        step: of that worker, from 0.
        phase: of that step, one of ``PHASES``.
        rate: instead of ``step``: the probability, each time that the phase comes.
        seed: of what is drawn then.
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
        """Its factor."""
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
    if fault.kind not in KINDS:
        close = hint(str(fault.kind), KINDS)
        raise _refuse(fault, close, f"kind must be one of {', '.join(KINDS)}")
    if fault.phase not in PHASES:
        close = hint(str(fault.phase), PHASES)
        raise _refuse(fault, close, f"phase must be one of {', '.join(PHASES)}")
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
    """As a user gives them: a list of mappings, or of faults.

    Raises:
        UserError: if one makes no sense.
    """
    if given is None:
        return ()
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
        raise UserError(
            f"faults={given!r} was given; it must be a list, as in "
            "faults=[{worker: 1, step: 20, kind: kill}]"
        )
    return tuple(each if isinstance(each, Fault) else _read(each) for each in given)


def _read(given: Any) -> Fault:
    known = [f.name for f in fields(Fault)]
    if not isinstance(given, Mapping) or "kind" not in given:
        raise UserError(
            f"faults: {given!r} was given; a fault is a mapping with a kind ({', '.join(KINDS)}), "
            "as in {worker: 1, step: 20, kind: kill}"
        )
    for key in given:
        if key not in known:
            raise UserError(
                f"faults: {key} was given{hint(str(key), known)}; a fault has {', '.join(known)}"
            )
    return Fault(**given)


def check_workers(faults: Sequence[Fault], n_workers: int) -> None:
    """Everybody who is to fail is there.

    Raises:
        UserError: if not.
    """
    for fault in faults:
        if fault.worker is not None and fault.worker >= n_workers:
            there = "the only one is 0" if n_workers == 1 else f"there are 0 to {n_workers - 1}"
            raise _refuse(fault, "", f"there is no worker {fault.worker}; {there}")
