"""How gradients and parameters travel between devices and host memory, as the user wants it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hybridtrain.errors import UserError
from hybridtrain.exchanges import Requirements
from hybridtrain.worker.device import KINDS

_DTYPES = {None: None, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Transport:
    """``dtype``: what float32 gradients are rounded to, on their way.

    ``overlap``: the update begins before backward ends, and the next forward before all parameters
    are there.

    Raises:
        UserError: if that makes no sense.
    """

    dtype: torch.dtype | None = None
    overlap: bool = False

    @classmethod
    def of(cls, dtype: Any, overlap: Any) -> Transport:
        """Checked."""
        if not (dtype is None or isinstance(dtype, str)) or dtype not in _DTYPES:
            raise UserError(
                f"transport_dtype={dtype!r} was given; it must be null (gradients travel as they "
                "are) or bf16 (those of float32 parameters are rounded on their way)"
            )
        if not isinstance(overlap, bool):
            raise UserError(f"overlap_update={overlap!r} was given; it must be true or false")
        return cls(_DTYPES[dtype], overlap)

    def check(self, strategy: Any, trainer: Any, requirements: Requirements) -> None:
        """See that it goes with what else was asked for.

        Raises:
            UserError: naming the options.
        """
        if self.dtype is not None and strategy.correction is not None:
            raise UserError(
                f"transport_dtype=bf16 was given with correction={strategy.correction}, which "
                "changes gradients where they lie and would round them once more; leave one out"
            )
        if self.dtype is not None and requirements.in_place:
            raise UserError(
                "transport_dtype=bf16 was given, but workers without a lock send no gradients; "
                "leave it out, or use strategy=async"
            )
        if self.overlap:
            _check_overlap(strategy, trainer, requirements)


def _check_overlap(strategy: Any, trainer: Any, requirements: Requirements) -> None:
    if not computes_apart(trainer):
        raise UserError(
            "overlap_update=true was given, but workers on a CPU read the parameters in place, "
            "which must not move while backward runs; leave it out, or train on a GPU"
        )
    if not requirements.whole_rounds:
        raise UserError(
            "overlap_update=true was given, but under this policy a contribution is decided on "
            "when it is whole; leave it out, or use strategy=hybrid"
        )
    for name, choice, needed in (
        ("on_nonfinite", strategy.on_fault.beside(trainer).nonfinite, "raise"),
        ("on_oom", strategy.on_fault.oom, "raise"),
        ("on_failure", strategy.on_failure.choice, "stop"),
    ):
        if choice != needed:
            raise UserError(
                f"overlap_update=true was given with {name}={choice}, but what has been updated "
                f"while backward ran cannot be left out any more; use {name}={needed}, or "
                "overlap_update=false"
            )


def computes_apart(trainer: Any) -> bool:
    """Whether workers compute on copies of the parameters."""
    return trainer.strategy.root_device.type in KINDS
