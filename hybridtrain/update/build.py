"""From a worker's optimizer to the update that serves it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybridtrain.errors import UserError
from hybridtrain.memory import Store
from hybridtrain.update.flat_adam import FlatAdam
from hybridtrain.update.pool import Pool
from hybridtrain.update.portable import load
from hybridtrain.update.update import Update
from hybridtrain.update.whole import WholeParameters

# What their steps need beyond a dense gradient, which is all that a worker sends.
_NOT_SERVED: dict[type[torch.optim.Optimizer], tuple[str, str]] = {
    torch.optim.LBFGS: ("evaluates its closure several times per step", "Adam or SGD"),
    torch.optim.SparseAdam: ("takes only sparse gradients", "Adam, which takes both"),
}


def load_updates(payloads: Sequence[bytes], store: Store, pool: Pool) -> list[Update]:
    """The updates of optimizers that a worker has dumped, over views of the masters.

    Raises:
        UserError: if an optimizer cannot be served here.
    """

    def parameter(number: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(store.master(store.layout.slots[number]))

    loaded = [load(payload, parameter) for payload in payloads]
    return [build_update(optimizer, numbers, store, pool) for optimizer, numbers in loaded]


def build_update(
    optimizer: torch.optim.Optimizer, numbers: Sequence[int], store: Store, pool: Pool
) -> Update:
    """The flat pass where it does exactly what the optimizer does, else the optimizer itself."""
    for kind, (why, instead) in _NOT_SERVED.items():
        if isinstance(optimizer, kind):
            name = type(optimizer).__name__
            raise UserError(
                f"optimizer {name} was given, which {why} and so cannot be stepped in host memory "
                f"from the workers' gradients; use {instead}, or strategy=ddp"
            )
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
