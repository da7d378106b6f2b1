"""A user's DataLoader: its order, batch sizes and batch sampler; and a copy with other samples.

A worker trains with the loader that was given, whatever its class: a copy of the object, with a
sampler of ours in the place of the user's. Lightning would make a new loader from arguments that it
guesses from attributes, so what a class keeps under another name would get its default.

A batch sampler with an ``__iter__`` of its own (to group by length) would make other mini-batches
of a part of the samples, so it is treated as a data set whose items are whole mini-batches, which
are dealt to the workers. An object around one DataLoader is copied around a copy of that. Streams,
other objects, and loaders that the user shares out alone, keep their samples.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from lightning_fabric.utilities.data import sized_len
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from hybridtrain.engine.samplers import EpochPlan, EpochSampler, Order, Seeded, drawn
from hybridtrain.engine.worker.client import Client
from hybridtrain.errors import UserError
from hybridtrain.lightning.hooks.loop_hooks import inside, noting_indices
from hybridtrain.virtual.training_task import Timetable

_S = TypeVar("_S")
_BY_HAND = (
    "with strategy.iterable=deal (each worker makes all mini-batches and takes its own) or "
    "strategy.iterable=own (the loader shares itself out by rank)"
)


def plan_of(
    dataloader: DataLoader[Any] | Batches,
    order: Order,
    sizes: tuple[int, ...] | None,
    n_workers: int,
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
            f"Trainer(use_distributed_sampler=False) {_BY_HAND}"
        )
    length = len(sampler)
    if batches is None:
        return EpochPlan(order, length, (1,) * n_workers, False, True)
    size = getattr(batches, "batch_size", 1) or 1
    drop_last, plain = bool(getattr(batches, "drop_last", False)), _draws_as_torch(batches)
    return EpochPlan(order, length, sizes or (size,) * n_workers, drop_last, not plain)


def sampler_of(dataloader: DataLoader[Any] | Batches) -> Any:
    """The user's sampler; of an explicit ``batch_sampler`` the one inside, which torch ignores.

    A ``DistributedSampler`` there is replaced, as under DDP.
    """
    inner = getattr(dataloader.batch_sampler, "sampler", None)
    replaced = inner is None or isinstance(inner, DistributedSampler)
    return dataloader.sampler if replaced else inner


def is_plain(dataloader: DataLoader[Any] | Batches) -> bool:
    """Whether each epoch has every sample of the data set once, in order or shuffled."""
    sampler, draws = sampler_of(dataloader), None
    if isinstance(sampler, RandomSampler | SequentialSampler):
        draws = type(sampler).__iter__  # a class may draw in its own way
    if draws is RandomSampler.__iter__:
        whole = not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    else:
        whole = draws is SequentialSampler.__iter__
    # It may be over a part of the data set, or over another one.
    return whole and len(sampler.data_source) == len(dataloader.dataset)  # type: ignore[arg-type]


def order_of(dataloader: DataLoader[Any] | Batches, shuffle: bool, client: Client) -> Order:
    """The order of an epoch: seeded, or drawn from the user's own sampler."""
    if is_plain(dataloader):
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if shuffle else None
        return Seeded(len(dataloader.dataset), seed)  # type: ignore[arg-type]
    return partial(drawn, sampler_of(dataloader), client, _most_of(dataloader))


def _most_of(dataloader: DataLoader[Any] | Batches) -> int | None:
    """Samples in as many mini-batches as the user's sampler says it has; it may draw more."""
    sampler, batches = sampler_of(dataloader), dataloader.batch_sampler
    if not isinstance(sampler, Sized):
        return None
    size = getattr(batches, "batch_size", 1) or 1
    whole, rest = divmod(len(sampler), size)
    return size * (whole + (rest > 0 and not getattr(batches, "drop_last", False)))


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


# ---- batch samplers ------------------------------------------------------------------------------


def _draws_as_torch(batches: Any) -> bool:
    """Whether a batch sampler's mini-batches are those of its sampler, in order."""
    return isinstance(batches, BatchSampler) and type(batches).__iter__ is BatchSampler.__iter__


def takes_a_sampler(dataloader: DataLoader[Any]) -> bool:
    """Whether the loader makes its mini-batches from any sampler that is put into it.

    A class that makes mini-batches in its own way would make others of a part of the samples,
    unless it was to (of a ``DistributedSampler``).
    """
    batches = dataloader.batch_sampler
    parts = isinstance(getattr(batches, "sampler", None), DistributedSampler)
    return batches is None or parts or _draws_as_torch(batches)


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
                f"use Trainer(use_distributed_sampler=False) {_BY_HAND}"
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


def as_samplers_see_it(dataloader: DataLoader[Any]) -> DataLoader[Any] | Batches:
    """The loader, or its whole mini-batches where these are dealt out."""
    return dataloader if takes_a_sampler(dataloader) else Batches.of(dataloader)


def is_countable(dataloader: DataLoader[Any]) -> bool:
    """Whether the loader's samples, or its whole mini-batches, can be counted."""
    takes = takes_a_sampler(dataloader)
    return isinstance(sampler_of(dataloader) if takes else dataloader.batch_sampler, Sized)


# ---- copies with other samples -------------------------------------------------------------------


def _copied(given: Any, **changed: Any) -> Any:
    """A copy of an object with its class and attributes, except for what is ``changed``.

    Past ``__init__``, ``__setattr__`` (torch guards a loader's attributes) and what a class does
    when it is pickled.
    """
    made = object.__new__(type(given))
    vars(made).update(vars(given), **changed)
    return made


def with_batches(dataloader: DataLoader[Any], batches: Any, **changed: Any) -> DataLoader[Any]:
    """A copy of the user's loader with another batch sampler, and no processes yet."""
    made: DataLoader[Any] = _copied(dataloader, batch_sampler=batches, _iterator=None, **changed)
    return made


def drawing(dataloader: DataLoader[Any], sampler: Any) -> DataLoader[Any]:
    """A copy of the user's loader that draws what ``sampler`` has.

    Args:
        dataloader: the user's.
        sampler: of samples, or of whole mini-batches where the loader takes no sampler.
    """
    given = dataloader.batch_sampler
    if given is None:
        return with_batches(dataloader, None, sampler=sampler)
    if not takes_a_sampler(dataloader):
        return with_batches(dataloader, Handed(sampler))
    return with_batches(dataloader, _copied(given, sampler=sampler), sampler=sampler)


def sized(dataloader: DataLoader[Any], size: int) -> DataLoader[Any]:
    """A copy of the user's loader with mini-batches of another size."""
    check_batches(dataloader)
    batches = _copied(dataloader.batch_sampler, batch_size=size)
    return with_batches(dataloader, batches, batch_size=size)


def undropped(dataloader: DataLoader[Any]) -> DataLoader[Any]:
    """The loader, or a copy that keeps the last mini-batch: predictions are of all samples."""
    batches = dataloader.batch_sampler
    if not getattr(batches, "drop_last", False):
        return dataloader
    return with_batches(dataloader, _copied(batches, drop_last=False))


def noting(loader: Any) -> Any:
    """A loader for prediction, whose batch sampler notes indices if it has one."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    if (batches := undropped(loader).batch_sampler) is None:
        return loader
    plain = hasattr(batches, "__dict__")  # a list has none, which Lightning needs
    return with_batches(loader, noting_indices(batches if plain else Handed(batches)))


def wrapped(loader: Any) -> tuple[str, DataLoader[Any]] | None:
    """The one DataLoader in an object around it (one that moves mini-batches to a device), with
    the name of the attribute; ``None``: the object is a DataLoader itself, or none that is known.
    """
    attributes = getattr(loader, "__dict__", {})
    if isinstance(loader, DataLoader) and "sampler" in attributes:
        return None
    found = [each for each in attributes.items() if isinstance(each[1], DataLoader)]
    return found[0] if len(found) == 1 else None


def around_another(loader: Any, name: str, inner: Any) -> Any:
    """A copy of the object around another DataLoader."""
    return _copied(loader, **{name: inner})


def sampler_in(loader: Any, kind: type[_S]) -> _S | None:
    """The sampler of this kind in a prepared loader, or in the one that it is around."""
    while (found := wrapped(loader)) is not None:
        loader = found[1]
    batches = inside(getattr(loader, "batch_sampler", None))
    places = (getattr(batches, "sampler", None), batches, getattr(loader, "sampler", None))
    return next((each for each in places if isinstance(each, kind)), None)


def check_asked(loader: Any, sampler: Any) -> None:
    """Refuse a loader whose mini-batches have come without a question to its sampler.

    Raises:
        UserError: if it has not been asked.
    """
    if not sampler.asked:
        raise UserError(
            f"the {type(loader).__name__} that was given makes its mini-batches without asking its "
            "sampler or batch_sampler, so its samples cannot be shared out; let its __iter__ draw "
            f"from self.batch_sampler, or use Trainer(use_distributed_sampler=False) {_BY_HAND}"
        )


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


def shares_nothing(loader: Any) -> bool:
    """Whether every worker would get all samples of a loader that no sampler of ours chooses."""
    batches = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    return not any(isinstance(each, DistributedSampler) for each in samplers)


def _named(loader: Any) -> str:
    """Return the name of the class of a loader's data set, or of the loader."""
    return type(getattr(loader, "dataset", loader)).__name__


def warn_of_dropped(loader: Any) -> None:
    """Warn that no worker can fetch a dropped mini-batch of a dealt loader again."""
    rank_zero_warn(
        "strategy.iterable=deal was given with a policy that drops late mini-batches: those of a "
        f"dealt {_named(loader)} cannot be fetched again, so no update has them; "
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
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        why = f"its {_named(loader)} is a stream, whose samples cannot be shared out"
    elif isinstance(loader, DataLoader):
        why = "use_distributed_sampler=False was given"
    else:
        why = f"{type(loader).__name__} is no DataLoader, whose samples could be shared out"
    rank_zero_warn(
        f"the {stage} loader is not shared out ({why}), so all {n_workers} workers use every "
        f"sample, {n_workers} times in all, unless it shares itself out by rank; give "
        "strategy.iterable=deal (each worker takes every "
        f"{n_workers}th mini-batch), or strategy.iterable=own if it is meant so"
    )


def batches_of(plan: EpochPlan | Timetable) -> int:
    """How many mini-batches the shared queue has in an epoch."""
    batches = plan.length * len(plan.sizes) / sum(plan.sizes)
    return math.floor(batches) if plan.drop_last else math.ceil(batches)


def plan_behind(loader: Any) -> EpochPlan | None:
    """The plan of our sampler in a loader; ``None``: the loader has another sampler."""
    sampler = sampler_in(loader, EpochSampler)
    return None if sampler is None else sampler.plan
