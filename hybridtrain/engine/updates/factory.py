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
    state_dtype: torch.dtype = torch.float32,
) -> list[Update]:
    """Build updates from a worker's pickled optimizers, over views of the masters.

    A number keeps that update of ``known``; its other updates are closed. ``state_dtype``: of their
    state tensors, between steps.

    Raises:
        UserError: if the server cannot step an optimizer.
    """

    def parameter(number: int) -> torch.nn.Parameter:
        return as_parameter(store.master(store.layout.slots[number]))

    def made(payload: bytes) -> Update:
        optimizer, numbers = load(payload, parameter)
        if state_dtype != torch.float32:
            check_state_dtype(optimizer, not store.layout.sparse.isdisjoint(numbers))
        return build_update(optimizer, numbers, store, pool, merge, state_dtype)

    updates = [known[each] if isinstance(each, int) else made(each) for each in payloads]
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
    state_dtype: torch.dtype = torch.float32,
) -> Update:
    """The flat pass if it has a kernel for the optimizer, else an update of the optimizer itself.

    ``merge``: makes one gradient of the workers', instead of their mean. ``state_dtype``: of state
    tensors between steps, in the flat pass; :func:`check_state_dtype` refuses other optimizers.

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
        return FlatUpdate(optimizer, numbers, store, pool, kernel, state_dtype)
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


_ROUNDED_WHOLE = "gradients are sparse, and the state is rounded as a whole; use sparse=False"


def check_state_dtype(optimizer: torch.optim.Optimizer, sparse: bool = False) -> None:
    """Check that the optimizer's state may be kept as bfloat16; ``sparse``: some gradients are.

    Raises:
        UserError: naming the optimizer, and what to use.
    """
    kernel, name = kernel_for(optimizer), type(optimizer).__name__
    if kernel is None:
        reason = (
            "only those of torch.optim that step each element by itself (Adam, AdamW, SGD with "
            "momentum, Adagrad, RMSprop), on float32 parameters and without foreach, have state "
            "that can be rounded; use one of them"
        )
    elif sparse:
        reason = _ROUNDED_WHOLE
    elif not kernel.may_be_rounded:
        reason = "its state is a mean of the parameters, which bf16 is too coarse for; use AdamW"
    elif not any(map(kernel.keeps, optimizer.param_groups)):
        reason = "it keeps no state; give it a momentum"
    else:
        return
    raise _not_rounded(name, reason)


def _not_rounded(name: str, reason: str) -> UserError:
    return UserError(
        f"state_dtype=bf16 was given with optimizer {name}, but {reason}, or leave state_dtype out"
    )


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
    if update.state_dtype != torch.float32:
        raise _not_rounded(update.name, _ROUNDED_WHOLE)
    optimizer, parameters = update.release_optimizer()
    update.close()
    if (rows := row_kernel(optimizer)) is not None:
        return ByRow(optimizer, list(parameters), store, pool, rows)
    return PerTensorUpdate(optimizer, list(parameters), store)
