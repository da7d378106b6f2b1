"""The memory of a run, once all workers have said what their parameters are."""

from __future__ import annotations

from collections.abc import Mapping

from hybridtrain.errors import UserError
from hybridtrain.exchanges import Requirements
from hybridtrain.memory import Arena, Layout, Store
from hybridtrain.memory.lending import SharedState
from hybridtrain.protocol.locked_steps import LockedSteps
from hybridtrain.protocol.messages import GetState, Share, Shared
from hybridtrain.protocol.shared_round import SharedRound
from hybridtrain.updates import Optimizers
from hybridtrain.updates.flat.lent_state import may_be_lent


def shared_store(shares: Mapping[int, Share], n_workers: int, requirements: Requirements) -> Store:
    """What everybody's parameters need, with the rows that the policy asks for.

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
    """As the server and every worker make it, over one arena.

    ``meets``: workers may make updates among themselves, where policy and parameters let them.
    """
    wants = requirements
    copies, holds, shared = wants.has_copies, wants.holds, wants.in_place
    lends = meets and not averaging and may_be_lent(layout, wants.one_by_one)
    words = 0
    if lends and wants.everyone:
        words = SharedRound.n_words(n_workers)
    elif lends and wants.one_by_one:
        words = LockedSteps.N_WORDS
    return Store(layout, n_workers, copies, arena, averaging, holds, shared, words)


def round_of(store: Store) -> SharedRound | None:
    """Where workers may meet, if they may."""
    if not store.round or store.made is not None:
        return None
    return SharedRound(store.round, store.n_workers, store.arena.fd)


def locked_steps_of(store: Store) -> LockedSteps | None:
    """Where workers may make updates one by one, if they may."""
    if not store.round or store.made is None:
        return None
    return LockedSteps(store.round, store.made, store.arena.fd)


def lend(store: Store | None, optimizers: Optimizers, request: GetState) -> SharedState | Shared:
    """What workers need that step by themselves."""
    assert store is not None, "parameters are shared before anything is lent"
    if request.arena is None:
        return optimizers.lent(request.optimizer)
    return Shared(store.lending.arenas[request.arena].n_bytes, request.arena)


def no_snapshot(failure: BaseException | None, optimizers: Optimizers) -> str | None:
    """Why the parameters and states are not those of any version, if so."""
    if failure is not None:
        return f"an optimizer failed half-way through its step: {failure}"
    if optimizers.under_way is not None:
        return "an optimizer is in the middle of its step"
    return None
