"""Loaders whose samples cannot be chosen: streams, and loaders that the user shares out alone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from lightning_fabric.utilities.data import sized_len
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset


class Dealing:
    """Every W-th mini-batch of a loader, from ``worker`` on. All are made, in every worker.

    Args:
        loader: the same, in the same order, in every worker.
        worker: whose.
        n_workers: W.
    """

    def __init__(self, loader: Any, worker: int, n_workers: int) -> None:
        self._loader, self._worker, self._n_workers = loader, worker, n_workers

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._loader), self._worker, None, self._n_workers)

    def __len__(self) -> int:
        length = sized_len(self._loader)
        if length is None or isinstance(getattr(self._loader, "dataset", None), IterableDataset):
            raise TypeError("the loader has no length")
        return len(range(self._worker, length, self._n_workers))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)


def shares_nothing(loader: Any, chosen: bool) -> bool:
    """Whether every worker would get all of it.

    Args:
        loader: the user's.
        chosen: its samples are chosen here.
    """
    if chosen or not isinstance(loader, DataLoader):
        return False
    batches = loader.batch_sampler
    samplers = (loader.sampler, batches, getattr(batches, "sampler", None))
    return not any(isinstance(each, DistributedSampler) for each in samplers)


def warn_of_repetition(loader: Any, stage: str, n_workers: int) -> None:
    """Each sample will be used by everybody."""
    stream = isinstance(loader.dataset, IterableDataset)
    why = (
        f"its {type(loader.dataset).__name__} is a stream, whose samples cannot be shared out"
        if stream
        else "use_distributed_sampler=False was given"
    )
    rank_zero_warn(
        f"the {stage} loader is not shared out ({why}), so all {n_workers} workers use every "
        f"sample, {n_workers} times in all, unless it shares itself out by rank; give "
        "strategy.iterable=deal (each worker takes every "
        f"{n_workers}th mini-batch), or strategy.iterable=own if it is meant so"
    )
