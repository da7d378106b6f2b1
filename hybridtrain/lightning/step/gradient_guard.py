"""What happens when a worker has no contribution to make: its gradient is not finite, or its memory
has run out.

Under all-reduce one such gradient is everybody's at once, and a worker that raises leaves the
others waiting. Here each contribution is looked at before it is handed over, so that the user can
choose: end the run and say whose fault it was (``raise``), leave this worker out of the step's mean
(``drop``), or leave the whole step out (``skip_step``). A callback that looks for losses that are
not finite (``SpikeDetection``) decides itself whether to end the run, and must get to see them:
under ``auto`` what comes of such a loss is left out, and training goes on to the callback.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning_fabric.utilities.spike import SpikeDetection
from pytorch_lightning import Trainer
from pytorch_lightning.utilities.memory import is_oom_error

from hybridtrain.errors import UserError
from hybridtrain.lightning.device_memory import note_need, out_of_memory
from hybridtrain.lightning.run_context import context_of
from hybridtrain.memory import Layout, Packed
from hybridtrain.worker.finite import FiniteCheck

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

    def beside(self, trainer: Any) -> OnFault:
        """``auto`` stays only where a callback looks for such losses; else it means ``raise``."""
        if self.nonfinite != AUTO:
            return self
        watched = any(isinstance(callback, SpikeDetection) for callback in trainer.callbacks)
        return self if watched else replace(self, nonfinite="raise")


class GradientGuard:
    """Stands between one worker and its push.

    Args:
        on_fault: what to do.
        check: looks at the worker's row.
        layout: knows the names of parameters.
        trainer: knows where training is, and whether a gradient scaler sees to overflows.
    """

    def __init__(
        self, on_fault: OnFault, check: FiniteCheck, layout: Layout, trainer: Trainer
    ) -> None:
        self._on_fault, self._check, self._layout = on_fault, check, layout
        self._trainer: Any = trainer
        self._scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        self._warned = 0
        self._batch: Any = None
        self._losses: list[torch.Tensor] | None = [] if on_fault.nonfinite == AUTO else None
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
        """Of the mini-batches since the last step; a callback will see it, too."""
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
        if not numbers:  # no optimizer, or an empty one
            return True
        if self._scaled:  # an overflow is the scaler's daily bread, and it skips the step itself
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
                "strategy.on_nonfinite=drop (leaves this worker out of the step) or skip_step"
            )
        self._note(NONFINITE, choice, what)
        return False

    def forgives(self, error: Exception) -> bool:
        """Whether training may go on after this exception, without this contribution."""
        if not (is_oom_error(error) or isinstance(error, MemoryError | torch.OutOfMemoryError)):
            return False
        context = context_of(self._trainer)
        if self._on_fault.oom == "raise":
            said = out_of_memory(error, context, context.collectives.weight)
            error.add_note(
                f"This happened in {self._where()}. {said} Or go on without this mini-batch with "
                "strategy.on_oom=drop or skip_step."
            )
            return False
        note_need(error, context)
        self._note(OUT_OF_MEMORY, self._on_fault.oom, f"{self._where()} ran out of memory")
        error.__traceback__ = None  # its frames hold what has filled the memory
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return True

    def pop_fault(self) -> str:
        """What the server has not heard of yet, if anything."""
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

    def _where(self) -> str:
        trainer = self._trainer
        return (
            f"worker {trainer.global_rank} ({context_of(trainer).root_device}) at step "
            f"{trainer.global_step}, epoch {trainer.current_epoch}, mini-batch "
            f"{trainer.fit_loop.epoch_loop.batch_idx}"
        )


def sample_ids(batch: Any) -> str | None:
    """What the mini-batch says about which samples it holds, shortened, or ``None``."""
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
