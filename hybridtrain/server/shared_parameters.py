"""Make the store of a run, in the server and in each worker."""

from __future__ import annotations

from collections.abc import Mapping

from hybridtrain.errors import UserError
from hybridtrain.exchanges import Requirements
from hybridtrain.memory import Arena, Layout, Store
from hybridtrain.protocol.locked_steps import LockedSteps
from hybridtrain.protocol.messages import Share
from hybridtrain.protocol.shared_round import SharedRound
from hybridtrain.protocol.step_log import StepLog
from hybridtrain.updates.flat.lent_state import may_be_lent


def shared_store(shares: Mapping[int, Share], n_workers: int, requirements: Requirements) -> Store:
    """The server's store, for the parameters of all workers and the rows that the policy needs.

    Raises:
        UserError: if workers have different parameters.
    """
    first, share = next(iter(shares.items()))
    for worker, other in shares.items():
        if other != share:
            raise UserError(
                f"worker {worker} has other parameters than worker {first}; every worker must "
                "build the same module (same code, same seed, same configuration)"
            )
    return made_store(share.layout, n_workers, requirements, share.averaging, None, share.meets)


def made_store(
    layout: Layout,
    n_workers: int,
    requirements: Requirements,
    averaging: bool,
    arena: Arena | None = None,
    meets: bool = False,
) -> Store:
    """The store, over a new arena in the server, and over the same one in each worker.

    ``meets``: workers may make updates without the server, if policy and parameters permit it.
    """
    wants = requirements
    lends = meets and not averaging and may_be_lent(layout, wants.one_by_one)
    words = 0
    if lends and wants.everyone:
        words = SharedRound.n_words(n_workers) + StepLog.n_words(n_workers)
    elif lends and wants.one_by_one:
        words = LockedSteps.N_WORDS + StepLog.n_words(1)
    copies, holds, shared = wants.has_copies, wants.holds, wants.in_place
    return Store(layout, n_workers, copies, arena, averaging, holds, shared, words)


def round_of(store: Store) -> SharedRound | None:
    """The shared round, if the store has one."""
    if not store.round or store.made is not None:
        return None
    return SharedRound(store.round, store.n_workers, store.arena.fd)


def locked_steps_of(store: Store) -> LockedSteps | None:
    """The lock of updates made one by one, if the store has one."""
    log = step_log_of(store)
    if log is None or store.made is None:
        return None
    return LockedSteps(store.round, store.made, store.arena.fd, log)


def step_log_of(store: Store) -> StepLog | None:
    """The log of updates that workers make, if they make any."""
    if not store.round:
        return None
    each = store.n_workers if store.made is None else 1
    return StepLog(store.round[-StepLog.n_words(each) :], each)
