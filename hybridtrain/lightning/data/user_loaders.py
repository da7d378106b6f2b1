"""Read a user's DataLoader: its order, batch sizes and batch sampler; and rebuild it for a worker.

Lightning gives each worker other samples by putting a sampler into the user's batch sampler. A
batch sampler that takes none, or has an ``__iter__`` of its own (to group by length), is treated as
a data set whose items are whole mini-batches, which are dealt to the workers. Streams, and loaders
that the user shares out alone, keep their samples.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence, Sized
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from lightning_fabric.utilities.data import sized_len
from lightning_utilities.core.rank_zero import rank_zero_warn
from pytorch_lightning.trainer.states import RunningStage
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from hybridtrain.errors import UserError
from hybridtrain.lightning.hooks.loop_hooks import (
    gets_our_sampler,
    noting_indices,
    rebuilt,
    takes_a_sampler,
)
from hybridtrain.training.samplers import EpochPlan, EpochSampler, Order, Seeded, drawn
from hybridtrain.worker.client import Client


def plan_of(
    dataloader: DataLoader[Any], order: Order, sizes: tuple[int, ...] | None, n_workers: int
) -> EpochPlan:
    """The plan by which workers share the loader's mini-batches.

    Args:
        dataloader: the user's.
        order: of an epoch.
        sizes: of the workers' mini-batches, if the user has given them.
        n_workers: W.

    Raises:
        UserError: if its sampler has no length.
    """
    sampler, batches = sampler_of(dataloader), dataloader.batch_sampler
    if not isinstance(sampler, Sized):
        raise UserError(
            f"the DataLoader has a sampler ({type(sampler).__name__}) without a length, so its "
            "samples cannot be shared out; give it a method __len__, or use "
            "Trainer(use_distributed_sampler=False) and let it draw other samples in each worker"
        )
    length = len(sampler)
    if sizes is not None:
        check_batches(dataloader)
    if batches is None:
        return EpochPlan(order, length, (1,) * n_workers, False, True)
    size = getattr(batches, "batch_size", 1) or 1
    plain = type(batches) is BatchSampler
    drop_last = bool(getattr(batches, "drop_last", False))
    return EpochPlan(order, length, sizes or (size,) * n_workers, drop_last, not plain)


def sampler_of(dataloader: DataLoader[Any]) -> Any:
    """The user's sampler; of an explicit ``batch_sampler`` the one inside, which torch ignores.

    A ``DistributedSampler`` there is replaced, as under DDP.
    """
    inner = getattr(dataloader.batch_sampler, "sampler", None)
    replaced = inner is None or isinstance(inner, DistributedSampler)
    return dataloader.sampler if replaced else inner


def is_plain(dataloader: DataLoader[Any]) -> bool:
    """Whether each epoch has every sample of the data set once, in order or shuffled."""
    sampler = sampler_of(dataloader)
    if isinstance(sampler, RandomSampler):
        whole = not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    else:
        whole = isinstance(sampler, SequentialSampler)
    # It may be over a part of the data set, or over another one.
    return whole and len(sampler.data_source) == len(dataloader.dataset)  # type: ignore[arg-type]


def order_of(dataloader: DataLoader[Any], shuffle: bool, client: Client) -> Order:
    """The order of an epoch: seeded, or drawn from the user's own sampler."""
    if is_plain(dataloader):
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if shuffle else None
        return Seeded(len(dataloader.dataset), seed)  # type: ignore[arg-type]
    return partial(drawn, sampler_of(dataloader), client)


# ---- mini-batches of other sizes -----------------------------------------------------------------


def check_batches(dataloader: DataLoader[Any]) -> None:
    """Refuse mini-batches whose size cannot be changed."""
    if type(dataloader.batch_sampler) is not BatchSampler:
        what = (
            "items that are whole mini-batches (batch_size=None)"
            if dataloader.batch_sampler is None
            else f"a batch sampler of its own ({type(dataloader.batch_sampler).__name__})"
        )
        raise UserError(
            f"batch_size_per_worker was given, but the training DataLoader has {what}, whose sizes "
            "it cannot change; give the DataLoader a batch_size, or leave batch_size_per_worker out"
        )


def lacks_batches(prepared: DataLoader[Any], dataloader: DataLoader[Any]) -> bool:
    """Whether Lightning has dropped the mini-batches of an explicit ``batch_sampler``.

    Of a loader made in a hook (``train_dataloader``) it makes mini-batches of one sample.
    """
    made, given = prepared.batch_sampler, dataloader.batch_sampler
    if made is None or prepared is dataloader:
        return made is None and given is not None
    explicit = type(given) is BatchSampler and dataloader.batch_size is None
    return explicit and type(made) is BatchSampler


def with_batches(prepared: DataLoader[Any], batches: Any) -> DataLoader[Any]:
    """Restore the mini-batches of an explicit ``batch_sampler``, which Lightning drops."""
    found = BatchSampler(prepared.sampler, batches.batch_size, batches.drop_last)
    return rebuilt(prepared, prepared, found)


# ---- batch samplers that take no sampler ---------------------------------------------------------


def makes_its_own(dataloader: Any, trainer: Any) -> bool:
    """Whether the loader needs a sampler of ours, and its batch sampler takes none."""
    if not isinstance(dataloader, DataLoader):
        return False
    if dataloader.batch_sampler is None or type(dataloader.batch_sampler) is BatchSampler:
        return False
    return gets_our_sampler(trainer, dataloader) and not takes_a_sampler(dataloader)


@dataclass(frozen=True)
class Batches:
    """A loader whose items are whole mini-batches, as samplers see it."""

    dataset: Any
    sampler: Any
    batch_sampler: None = None

    @classmethod
    def of(cls, dataloader: DataLoader[Any]) -> Batches:
        """Wrap the user's loader.

        Raises:
            UserError: if its batch sampler has no length.
        """
        batches: Any = dataloader.batch_sampler
        if not isinstance(batches, Sized):
            raise UserError(
                f"the DataLoader has a batch sampler ({type(batches).__name__}) without a length, "
                "so its mini-batches cannot be dealt out to workers; give it a method __len__, or "
                "use Trainer(use_distributed_sampler=False) and let it make other mini-batches in "
                "each worker"
            )
        return cls(dataloader.dataset, batches)


class Handed(Sampler[Any]):
    """Has the items of what it is given.

    Of whole mini-batches it is the batch sampler in place of the user's; of the indices of a
    prediction, worker 0's draw of the user's sampler, it is a sampler.

    Args:
        sampler: with a length; Lightning sets its epoch if it is one of ours.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.sampler)


def handed(dataloader: DataLoader[Any], sampler: Any, mode: RunningStage) -> DataLoader[Any]:
    """Rebuild the user's loader with the mini-batches of ``sampler``."""
    plain = copy(dataloader)  # of a kind that Lightning can rebuild
    vars(plain)["batch_sampler"] = BatchSampler(dataloader.sampler, 1, False)
    predicts = mode == RunningStage.PREDICTING
    return rebuilt(dataloader, plain, noting_indices(sampler) if predicts else Handed(sampler))


# ---- loaders whose samples cannot be chosen ------------------------------------------------------


class Dealing:
    """Every W-th mini-batch of a loader, starting with number ``worker``. Each worker makes all.

    Args:
        loader: the same, in the same order, in every worker.
        worker: number of the worker.
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
    """Whether every worker would get all samples.

    Args:
        loader: the user's.
        chosen: a sampler of ours chooses its samples.
    """
    if chosen or not isinstance(loader, DataLoader):
        return False
    batches = loader.batch_sampler
    samplers = (loader.sampler, batches, getattr(batches, "sampler", None))
    return not any(isinstance(each, DistributedSampler) for each in samplers)


def warn_of_dropped(loader: Any) -> None:
    """Warn that no worker can fetch a dropped mini-batch of a dealt loader again."""
    rank_zero_warn(
        "strategy.iterable=deal was given with a policy that drops late mini-batches: those of a "
        f"dealt {type(loader.dataset).__name__} cannot be fetched again, so no update has them; "
        "give a loader whose samples can be chosen, or use strategy=hybrid or async"
    )


def warn_of_pairs(plan: EpochPlan, others: Sequence[EpochSampler]) -> None:
    """Warn that mini-batches of unlike loaders are drawn independently of one another."""
    if not all(plan.is_like(other.plan) for other in others):
        rank_zero_warn(
            "several training loaders of different lengths or batch sizes were given with workers "
            "that run freely: each worker draws the next mini-batch of every loader, so those of "
            "one step need not be the same place of their loaders; if they belong together, give "
            "one loader of a StackDataset, or use strategy=hybrid"
        )


def warn_of_repetition(loader: Any, stage: str, n_workers: int) -> None:
    """Warn that every worker uses each sample."""
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
