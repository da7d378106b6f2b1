"""Handle a step without a contribution: the gradient is not finite, or memory has run out.

A worker that raises leaves the others waiting, under all-reduce. Here the user can choose (see
:mod:`hybridtrain.engine.step.guard`). A callback that looks for losses that are not finite
(``SpikeDetection``) decides itself whether to end the run, and must get to see them: under ``auto``
what comes of such a loss is left out, and training goes on to the callback.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import torch
from lightning_fabric.utilities.spike import SpikeDetection
from pytorch_lightning import Trainer
from pytorch_lightning.utilities.memory import is_oom_error

from hybridtrain.engine.memory import Layout
from hybridtrain.engine.step.guard import AUTO, OUT_OF_MEMORY, Guard, OnFault
from hybridtrain.engine.worker.finite import FiniteCheck
from hybridtrain.lightning.collectives import Collectives
from hybridtrain.lightning.device_memory import DeviceUse, note_need, out_of_memory
from hybridtrain.lightning.hooks.trainer_hooks import scaler_of


def beside(on_fault: OnFault, trainer: Any) -> OnFault:
    """``auto`` stays only where a callback looks for such losses; else it means ``raise``."""
    if on_fault.nonfinite != AUTO:
        return on_fault
    watched = any(isinstance(callback, SpikeDetection) for callback in trainer.callbacks)
    return on_fault if watched else replace(on_fault, nonfinite="raise")


class GradientGuard(Guard):
    """Stands between one worker and its push.

    Args:
        on_fault: what to do.
        check: looks at the worker's row.
        layout: knows the names of parameters.
        trainer: knows where training is, and whether a gradient scaler sees to overflows.
        use: of the device by this worker.
        collectives: know the number of samples of a mini-batch.
    """

    def __init__(
        self,
        on_fault: OnFault,
        check: FiniteCheck,
        layout: Layout,
        trainer: Trainer,
        use: DeviceUse,
        collectives: Collectives,
    ) -> None:
        super().__init__(on_fault, check, layout, self._place)
        self._trainer: Any = trainer
        self._use, self._collectives = use, collectives
        self.lenient = scaler_of(trainer) is not None

    def forgives(self, error: Exception) -> bool:
        """Whether training may go on after this exception, without this contribution."""
        if not (is_oom_error(error) or isinstance(error, MemoryError | torch.OutOfMemoryError)):
            return False
        if self._on_fault.oom == "raise":
            said = out_of_memory(error, self._use, self._collectives.samples)
            error.add_note(
                f"This happened in {self._where()}. {said} Or go on without this mini-batch with "
                "strategy.on_oom=drop or skip_step."
            )
            return False
        note_need(error, self._use)
        self._note(OUT_OF_MEMORY, self._on_fault.oom, f"{self._where()} ran out of memory")
        error.__traceback__ = None  # its frames hold what has filled the memory
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return True

    def _place(self) -> str:
        trainer = self._trainer
        return (
            f"worker {trainer.global_rank} ({self._use.device}) at step "
            f"{trainer.global_step}, epoch {trainer.current_epoch}, mini-batch "
            f"{trainer.fit_loop.epoch_loop.batch_idx}"
        )
