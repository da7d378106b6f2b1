"""Make the store of a run, in the server and in each worker."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import zip_longest

from hybridtrain.engine.exchanges import Requirements
from hybridtrain.engine.exchanges.compression import make_codec
from hybridtrain.engine.memory import Arena, Layout, Store, UpdateMaker
from hybridtrain.engine.memory.turns import Turning
from hybridtrain.engine.protocol.host_round import HostRound
from hybridtrain.engine.protocol.locked_steps import LockedSteps
from hybridtrain.engine.protocol.messages import Share
from hybridtrain.engine.protocol.shared_round import SharedRound
from hybridtrain.engine.protocol.step_log import StepLog
from hybridtrain.engine.updates.flat.lent_state import may_be_lent
from hybridtrain.errors import UserError


def shared_store(shares: Mapping[int, Share], n_workers: int, requirements: Requirements) -> Store:
    """The server's store, for the parameters of all workers and the rows that the policy needs.

    Raises:
        UserError: if workers have different parameters.
    """
    first, share = next(iter(shares.items()))
    for worker, other in shares.items():
        if other != share:
            raise UserError(
                f"worker {worker} has other parameters than worker {first}"
                f"{_first_difference(share.layout, other.layout)}; every worker must build the "
                "same module (same code, same seed, same configuration)"
            )
    return made_store(
        share.layout,
        n_workers,
        requirements,
        share.averaging,
        worker_updates=share.worker_updates,
        on_devices=share.on_device,
    )


def _first_difference(one: Layout, other: Layout) -> str:
    for mine, theirs in zip_longest(one.slots, other.slots):
        if mine != theirs:
            here, there = (
                "nothing" if each is None else f"{each.name} {tuple(each.shape)} {each.dtype}"
                for each in (mine, theirs)
            )
            return f" ({there}, not {here})"
    return ""


def made_store(
    layout: Layout,
    n_workers: int,
    wants: Requirements,
    averaging: bool,
    arena: Arena | None = None,
    worker_updates: bool = False,
    here: Collection[int] | None = None,
    on_devices: bool = False,
) -> Store:
    """The store, over a new arena in the server, and over the same one in each worker.

    ``worker_updates``: worker and module permit updates without the server. ``here``: the workers
    of this host, if not all are. ``on_devices``: see ``Turning``. This is where the run's
    :class:`UpdateMaker` is chosen.
    """
    maker = wants.maker
    if maker.borrows and not (worker_updates and not averaging and may_be_lent(layout, maker)):
        maker = UpdateMaker.SERVER
    words = 0
    if maker is UpdateMaker.LAST_WORKER:
        words = SharedRound.n_words(n_workers) + StepLog.n_words(n_workers)
    elif maker is UpdateMaker.ONE_BY_ONE:
        words = LockedSteps.N_WORDS + StepLog.n_words(1)
    elif wants.together > 1:
        words = HostRound.n_words(wants.together, len(layout.slots))
    return Store(
        layout,
        n_workers,
        wants.has_copies,
        arena,
        averaging,
        wants.holds,
        maker,
        words,
        here,
        turning_of(wants, on_devices),
    )


def turning_of(wants: Requirements, on_devices: bool = False) -> Turning | None:
    """What both buffers get that workers read in turn, where an update is behind a release."""
    codec = make_codec(wants.encodes)
    return Turning(wants.extrapolates, codec, on_devices) if wants.delay else None


def round_of(store: Store) -> SharedRound:
    """The shared round, where the last worker makes the update."""
    return SharedRound(store.protocol_words, store.n_workers, store.arena.fd)


def locked_steps_of(store: Store) -> LockedSteps:
    """The lock of updates made one by one."""
    assert store.step_counts is not None, "workers count them"
    return LockedSteps(store.protocol_words, store.step_counts, store.arena.fd, step_log_of(store))


def step_log_of(store: Store) -> StepLog:
    """The log of updates that workers make with borrowed state."""
    each = store.n_workers if store.maker is UpdateMaker.LAST_WORKER else 1
    return StepLog(store.protocol_words[-StepLog.n_words(each) :], each)
