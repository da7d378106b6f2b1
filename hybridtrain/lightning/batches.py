"""How many samples a mini-batch has, and so how much its gradient weighs."""

from __future__ import annotations

from typing import Any

import torch

from hybridtrain.errors import UserError


def samples_in(batch: Any) -> int | None:
    """The first dimension of the first tensor in a batch of any nesting, or ``None``."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.ndim else 1
    if isinstance(batch, dict):
        batch = batch.values()
    elif hasattr(batch, "__dataclass_fields__"):
        batch = vars(batch).values()
    elif isinstance(batch, str) or not hasattr(batch, "__iter__"):
        return None
    for part in batch:
        if (found := samples_in(part)) is not None:
            return found
    return None


def weigh(batch: Any) -> float:
    """The number of samples.

    Raises:
        UserError: if the batch does not show it.
    """
    found = samples_in(batch)
    if found is None:
        raise UserError(
            f"the number of samples in a batch of type {type(batch).__name__} cannot be seen, so "
            "its gradient cannot be weighted; let the first tensor in the batch have the samples "
            "as its first dimension"
        )
    return float(found)
