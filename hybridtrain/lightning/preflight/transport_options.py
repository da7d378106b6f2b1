"""The option ``transport_dtype``: rounding of gradients between device and host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hybridtrain.errors import UserError
from hybridtrain.exchanges import Requirements
from hybridtrain.exchanges.compression import codec_of

_DTYPES = {None: None, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Transport:
    """``dtype``: float32 gradients are rounded to it for the transfer."""

    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, dtype: Any) -> Transport:
        """Make it from the option's checked value."""
        return cls(_DTYPES[dtype])

    def check(self, strategy: Any, trainer: Any, requirements: Requirements) -> None:
        """Check it against the other options.

        Raises:
            UserError: naming the options.
        """
        if self.dtype is not None and strategy.correction is not None:
            raise UserError(
                f"transport_dtype=bf16 was given with correction={strategy.correction}, which "
                "changes gradients where they lie and would round them once more; leave one out"
            )
        if self.dtype is not None and codec_of(strategy.exchange) is not None:
            raise UserError(
                f"transport_dtype=bf16 was given with exchange={strategy.exchange}, which encodes "
                "what workers hand over, from the dtype that it has; leave one out"
            )
        if self.dtype is not None and requirements.in_place:
            raise UserError(
                "transport_dtype=bf16 was given, but workers without a lock send no gradients; "
                "leave it out, or use strategy=async"
            )
