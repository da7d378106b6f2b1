"""Chooses the update for a worker's optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybridtrain.engine.exchanges.exchange import MergeRule
from hybridtrain.engine.memory import Store
from hybridtrain.engine.memory.layout import as_parameter
from hybridtrain.engine.updates.base import Contribution, Update
from hybridtrain.engine.updates.delay_tolerant import DelayTolerant, DelayTolerantUpdate
from hybridtrain.engine.updates.flat.flat_update import FlatUpdate
from hybridtrain.engine.updates.groups import calls_closure, look_for_no_device, needs_closure
from hybridtrain.engine.updates.kernels import kernel_for
from hybridtrain.engine.updates.per_tensor import ClosureOptimizer, PerTensorUpdate
from hybridtrain.engine.updates.searches import Searches, SearchUpdate
from hybridtrain.engine.updates.serialize import load
from hybridtrain.engine.updates.shared_state import SharedStateOptimizer
from hybridtrain.engine.updates.sparse.by_row import ByRow
from hybridtrain.engine.updates.sparse.row_kernels import row_kernel
from hybridtrain.engine.updates.thread_pool import Pool
from hybridtrain.errors import UserError


def load_updates(
    payloads: Sequence[bytes | int],
    store: Store,
    pool: Pool,
    known: Sequence[Update] = (),
    merge: MergeRule | None = None,
) -> list[Update]:
    """Build updates from a worker's pickled optimizers, over views of the masters.

    A number keeps that update of ``known``; its other updates are closed.

    Raises:
        UserError: if the server cannot step an optimizer.
    """

    def parameter(number: int) -> torch.nn.Parameter:
        return as_parameter(store.master(store.layout.slots[number]))

    updates = [
        known[payload]
        if isinstance(payload, int)
        else build_update(*load(payload, parameter), store, pool, merge)
        for payload in payloads
    ]
    for update in known:
        if update not in updates:
            update.close()
    return updates


def build_update(
    optimizer: torch.optim.Optimizer,
    numbers: Sequence[int],
    store: Store,
    pool: Pool,
    merge: MergeRule | None = None,
) -> Update:
    """The flat pass if it has a kernel for the optimizer, else an update of the optimizer itself.

    ``merge``: makes one gradient of the workers', instead of their mean.

    Raises:
        UserError: if the optimizer needs a closure, and workers run asynchronously.
    """
    for group in optimizer.param_groups:
        if group.get("capturable"):
            group["capturable"] = False  # for CUDA graphs; the masters are in host memory
    look_for_no_device(optimizer)
    if merge is not None:
        _check_merges(merge, optimizer)
        return PerTensorUpdate(optimizer, numbers, store, merge)
    if isinstance(optimizer, Searches):
        return SearchUpdate(optimizer, numbers, store)
    if isinstance(optimizer, DelayTolerant) and not store.lock_free:
        return DelayTolerantUpdate(optimizer, numbers, store)
    if store.lock_free and not needs_closure(optimizer):
        return SharedStateOptimizer(optimizer, numbers, store)
    if (kernel := kernel_for(optimizer)) is not None:
        return FlatUpdate(optimizer, numbers, store, pool, kernel)
    if (rows := row_kernel(optimizer)) is not None:
        return ByRow(optimizer, numbers, store, pool, rows)
    if not calls_closure(optimizer):
        return PerTensorUpdate(optimizer, numbers, store)
    if not store.private_parameters and not store.lock_free:
        return ClosureOptimizer(optimizer, numbers, store)
    if needs_closure(optimizer):
        raise UserError(
            f"optimizer {type(optimizer).__name__} was given, which evaluates its closure several "
            "times per step at parameters that stand still meanwhile, but workers that run freely "
            "never wait; use strategy=hybrid, or Adam or SGD"
        )
    return PerTensorUpdate(optimizer, numbers, store)


def _check_merges(merge: MergeRule, optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    if calls_closure(optimizer) or isinstance(optimizer, DelayTolerant):
        raise UserError(
            f"update={type(merge).__name__} was given with optimizer {name}, which wants more than "
            "one merged gradient for a step; use SGD or Adam, or update=user"
        )


def for_sparse(
    update: Update, contributions: Sequence[Contribution], store: Store, pool: Pool
) -> Update:
    """Replace the flat pass, which needs dense gradients, at the first sparse gradient."""
    if not isinstance(update, FlatUpdate) or not any(each.packed for each in contributions):
        return update
    optimizer, parameters = update.release_optimizer()
    update.close()
    if (rows := row_kernel(optimizer)) is not None:
        return ByRow(optimizer, list(parameters), store, pool, rows)
    return PerTensorUpdate(optimizer, list(parameters), store)
