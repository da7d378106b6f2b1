"""Other mini-batches than those of the user's DataLoader."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from hybridtrain.errors import UserError
from hybridtrain.lightning.hooks.loader_hooks import rebuilt


def check_batches(dataloader: DataLoader[Any]) -> None:
    """Refuse mini-batches whose size is not ours to choose."""
    if type(dataloader.batch_sampler) is not BatchSampler:
        what = (
            "items that are whole mini-batches (batch_size=None)"
            if dataloader.batch_sampler is None
            else f"a batch sampler of its own ({type(dataloader.batch_sampler).__name__})"
        )
        raise UserError(
            f"batch_size_per_worker was given, but the training DataLoader has {what}, whose sizes "
            "it cannot change; give the DataLoader a batch_size, or leave batch_size_per_worker out"
        )


def with_batches(prepared: DataLoader[Any], batches: Any) -> DataLoader[Any]:
    """Mini-batches, where Lightning has lost them: of an explicit ``batch_sampler``."""
    found = BatchSampler(prepared.sampler, batches.batch_size, batches.drop_last)
    return rebuilt(prepared, prepared, found)
