"""The guard: leaves out, or refuses, a gradient that is not finite.

Under all-reduce one such gradient is everybody's at once. Here each contribution is checked before
it is handed over, so that the user can choose: end the run and say whose fault it was (``raise``),
leave this worker out of the step's mean (``drop``), or leave the whole step out (``skip_step``).
Under ``auto`` a loss that is not finite decides: what comes of it is left out.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from hybridtrain.engine.memory import Layout, Packed
from hybridtrain.engine.worker.finite import FiniteCheck
from hybridtrain.errors import UserError

AUTO = "auto"
NONFINITE, OUT_OF_MEMORY = "nonfinite", "oom"
_WARNINGS = 10  # of each worker; after that, faults are only counted
_IDS = ["id", "ids", "sample_id", "sample_ids", "uid", "index", "indices", "idx", "key", "keys"]
_IDS += ["file", "files", "filename", "filenames", "path", "paths", "name", "names"]


class NotFinite(UserError):
    """A gradient that is not finite, where nothing else is to be done about it."""


@dataclass(frozen=True, slots=True)
class OnFault:
    """The user's choices: ``raise``, ``drop``, ``skip_step``; ``nonfinite`` may be ``auto``."""

    nonfinite: str = AUTO
    oom: str = "raise"


class Guard:
    """Stands between one worker and its push.

    Args:
        on_fault: what to do.
        check: looks at the worker's row.
        layout: knows the names of parameters.
        where: says which worker this is, and where training is.
    """

    def __init__(
        self, on_fault: OnFault, check: FiniteCheck, layout: Layout, where: Callable[[], str]
    ) -> None:
        self._on_fault, self._check, self._layout, self._where = on_fault, check, layout, where
        self._warned = 0
        self._batch: Any = None
        self._losses: list[torch.Tensor] | None = [] if on_fault.nonfinite == AUTO else None
        self.lenient = False  # a gradient scaler skips the step itself after an overflow
        self.veto = False  # until the next step is over: it is to be left out
        self.fault = ""  # not yet told to the server

    def begin(self, batch: Any, new_step: bool) -> None:
        """A mini-batch begins."""
        self._batch = batch
        if new_step:
            self.veto = False
            if self._losses:
                self._losses.clear()

    def see(self, loss: torch.Tensor) -> None:
        """Keep the loss of a mini-batch until the next step; a callback will see it, too."""
        if self._losses is not None:
            self._losses.append(loss.detach())

    def accepts(
        self,
        numbers: tuple[int, ...],
        absent: Collection[int],
        packed: Collection[Packed] = (),
        finite: Collection[int] = (),
    ) -> bool:
        """Whether the gradients in the row may count, of which some are known to be finite.

        Raises:
            NotFinite: if they may not, and the user wants to end there.
        """
        if self.lenient or not numbers:  # no optimizer, or an empty one
            return True
        offender = self._check.offender(numbers, absent, packed, finite)
        if offender is None:
            return True
        what = self._describe(offender)
        self._check.forget()
        choice = self._on_fault.nonfinite
        if choice == AUTO:  # a callback decides, unless it has nothing to see
            choice = "raise" if all(x.isfinite().all() for x in self._losses or ()) else "drop"
        if choice == "raise":
            raise NotFinite(
                f"{what}; look at these samples or lower the learning rate, or go on with "
                "on_nonfinite=drop (leaves this worker out of the step) or skip_step"
            )
        self._note(NONFINITE, choice, what)
        return False

    def pop_fault(self) -> str:
        """Take the fault that has not been reported to the server yet; empty: there is none."""
        fault, self.fault = self.fault, ""
        return fault

    def _note(self, fault: str, choice: str, what: str) -> None:
        self.fault, self.veto = fault, self.veto or choice == "skip_step"
        self._warned += 1
        left_out = "the step" if self.veto else "its gradient"
        if self._warned <= _WARNINGS:
            more = "; further ones are only counted" * (self._warned == _WARNINGS)
            warnings.warn(f"{what}; {left_out} is left out{more}", stacklevel=2)

    def _describe(self, number: int) -> str:
        bad, total = self._check.count(number)
        what = f"{self._layout.slots[number].name} ({bad} of {total} elements)"
        text = f"{self._where()} has a gradient that is not finite: {what}"
        ids = sample_ids(self._batch)
        return text if ids is None else f"{text}, samples {ids}"


def sample_ids(batch: Any) -> str | None:
    """The ids of the samples that a mini-batch carries, shortened; ``None``: it carries none."""
    fields = batch if isinstance(batch, dict) else getattr(batch, "__dict__", {})
    if hasattr(batch, "_asdict"):
        fields = batch._asdict()
    for name in _IDS:
        if name in fields:
            ids = fields[name]
            listed = ids.flatten().tolist() if isinstance(ids, torch.Tensor) else ids
            text = str(listed)
            return f"{name}={text if len(text) <= 200 else text[:197] + '...'}"
    return None
