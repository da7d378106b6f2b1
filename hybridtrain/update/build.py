"""From a worker's optimizer to the update that serves it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybridtrain.errors import UserError
from hybridtrain.memory import Store
from hybridtrain.update.driven import Driven
from hybridtrain.update.flat_adam import FlatAdam
from hybridtrain.update.kinds import calls_closure, needs_closure
from hybridtrain.update.lent import LentOptimizer
from hybridtrain.update.pool import Pool
from hybridtrain.update.portable import load
from hybridtrain.update.update import Update
from hybridtrain.update.whole import WholeParameters


def load_updates(
    payloads: Sequence[bytes | int], store: Store, pool: Pool, known: Sequence[Update] = ()
) -> list[Update]:
    """The updates of optimizers that a worker has dumped, over views of the masters.

    A number stands for one of those that are ``known``; the rest of these are closed.

    Raises:
        UserError: if an optimizer cannot be served here.
    """

    def parameter(number: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(store.master(store.layout.slots[number]))

    updates = [
        known[payload]
        if isinstance(payload, int)
        else build_update(*load(payload, parameter), store, pool)
        for payload in payloads
    ]
    for update in known:
        if update not in updates:
            update.close()
    return updates


def build_update(
    optimizer: torch.optim.Optimizer, numbers: Sequence[int], store: Store, pool: Pool
) -> Update:
    """The flat pass where it does exactly what the optimizer does, else the optimizer itself.

    Raises:
        UserError: if the optimizer must drive the workers, and they run freely.
    """
    for group in optimizer.param_groups:
        if group.get("capturable"):
            group["capturable"] = False  # a matter of CUDA graphs; here is host memory
    if store.lock_free and not needs_closure(optimizer):
        return LentOptimizer(optimizer, numbers, store)
    if is_flat_adam(optimizer):
        return FlatAdam(optimizer, numbers, store, pool)
    if not calls_closure(optimizer):
        return WholeParameters(optimizer, numbers, store)
    if not store.private_parameters and not store.lock_free:
        return Driven(optimizer, numbers, store)
    if needs_closure(optimizer):
        raise UserError(
            f"optimizer {type(optimizer).__name__} was given, which evaluates its closure several "
            "times per step at parameters that stand still meanwhile, but workers that run freely "
            "never wait; use strategy=hybrid, or Adam or SGD"
        )
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
