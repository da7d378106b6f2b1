"""What is read off a user's training loader: its order, and how it is made into mini-batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Sized
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler

from hybridtrain.lightning.data.batch_resizing import check_batches
from hybridtrain.lightning.data.epoch_order import Drawn, Order, Seeded
from hybridtrain.lightning.data.samplers import EpochPlan
from hybridtrain.worker.client import Client


def plan_of(
    dataloader: DataLoader[Any],
    order: Order,
    sizes: tuple[int, ...] | None,
    n_workers: int,
    turn: Callable[[], int],
    fills: Callable[[], bool],
) -> EpochPlan:
    """How the loader's mini-batches are shared out.

    Args:
        dataloader: the user's.
        order: of an epoch.
        sizes: the workers' mini-batches, if the user has given some.
        n_workers: W.
        turn: see :class:`EpochPlan`, as what follows.
        fills: whether who has nothing gets a filler.
    """
    sampler, batches = dataloader.sampler, dataloader.batch_sampler
    length = len(sampler) if isinstance(sampler, Sized) else 0
    if sizes is not None:
        check_batches(dataloader)
    if batches is None:
        return EpochPlan(order, length, (1,) * n_workers, False, True, turn, fills)
    size = getattr(batches, "batch_size", 1) or 1
    plain = type(batches) is BatchSampler
    drop_last = bool(getattr(batches, "drop_last", False))
    return EpochPlan(order, length, sizes or (size,) * n_workers, drop_last, not plain, turn, fills)


def order_of(dataloader: DataLoader[Any], shuffle: bool, client: Client) -> Order:
    """The order of an epoch: our own, or as the user's sampler gives it."""
    sampler: Sampler[int] = dataloader.sampler  # type: ignore[assignment]
    if isinstance(sampler, SequentialSampler) or _is_plain_random(sampler):
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if shuffle else None
        return Seeded(len(dataloader.dataset), seed)  # type: ignore[arg-type]
    return Drawn(sampler, client)


def _is_plain_random(sampler: object) -> bool:
    return (
        isinstance(sampler, RandomSampler)
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    )
