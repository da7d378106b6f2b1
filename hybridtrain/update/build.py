"""Which update serves an optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybridtrain.memory import Store
from hybridtrain.update.flat_adam import FlatAdam
from hybridtrain.update.pool import Pool
from hybridtrain.update.update import Update
from hybridtrain.update.whole import WholeParameters


def build_update(
    optimizer: torch.optim.Optimizer, numbers: Sequence[int], store: Store, pool: Pool
) -> Update:
    """The flat pass where it does exactly what the optimizer does, else the optimizer itself."""
    if is_flat_adam(optimizer):
        return FlatAdam(optimizer, numbers, store, pool)
    return WholeParameters(optimizer, numbers, store)


def is_flat_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this is plain Adam or AdamW on float32, with no engine chosen by the user."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    groups = optimizer.param_groups
    same_amsgrad = len({bool(group["amsgrad"]) for group in groups}) == 1
    return same_amsgrad and all(
        not group.get("foreach")
        and group.get("fused") is not False
        and not group.get("capturable")
        and not group.get("differentiable")
        and all(p.dtype == torch.float32 for p in group["params"])
        for group in groups
    )
