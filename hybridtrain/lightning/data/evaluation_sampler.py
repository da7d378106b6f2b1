"""Samplers of validation, test and prediction: all workers together use each sample once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from lightning_fabric.utilities.data import sized_len
from pytorch_lightning.trainer.states import RunningStage
from torch.utils.data import Sampler

from hybridtrain.lightning.hooks.loop_hooks import limited_batches
from hybridtrain.worker.client import Client


@dataclass
class Group:
    """The lengths of an evaluation's loaders, and the number of workers that share them."""

    n_workers: int
    lengths: list[int] = field(default_factory=list)

    @property
    def n_active(self) -> int:
        """Workers with a sample in every loader; empty loaders do not count."""
        return min([self.n_workers, *(n for n in self.lengths if n)])


class EvaluationSampler(Sampler[int]):
    """Every m-th sample, of m workers, in the order of the user's sampler."""

    def __init__(self, indices: Sequence[int], place: int, group: Group) -> None:
        self._indices, self._place, self._group = indices, place, group
        group.lengths.append(len(indices))

    def _share(self) -> range:
        n_active, everything = self._group.n_active, range(len(self._indices))
        return everything[self._place :: n_active] if self._place < n_active else range(0)

    def __len__(self) -> int:
        return len(self._share())

    def __iter__(self) -> Iterator[int]:
        return (self._indices[place] for place in self._share())


class Whole(Sampler[int]):
    """All samples, in worker 0's draw of the user's sampler."""

    def __init__(self, indices: Sequence[int]) -> None:
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)


class Dealt(Sampler[Any]):
    """Every W-th of one device's mini-batches for prediction, starting with this worker's number.

    Args:
        batches: all mini-batches, or all items where items are mini-batches.
        client: of this worker.
        limit: ``Trainer(limit_predict_batches=…)``, of all workers together.
    """

    def __init__(self, batches: Any, client: Client, limit: int | float) -> None:
        self._batches, self._client, self._limit = batches, client, limit

    def _total(self) -> int | None:
        length = sized_len(self._batches)
        if length is None:
            return self._limit if isinstance(self._limit, int) else None
        return int(limited_batches(RunningStage.PREDICTING, length, self._limit))

    def __len__(self) -> int:
        total = self._total()
        if sized_len(self._batches) is None or total is None:
            raise TypeError("the batch sampler has no length")
        return len(range(self._client.worker, total, self._client.n_workers))

    def __iter__(self) -> Iterator[Any]:
        client = self._client
        return islice(iter(self._batches), client.worker, self._total(), client.n_workers)
