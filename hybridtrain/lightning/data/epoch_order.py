"""The order in which an epoch goes through a data set: the same in every worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.utils.data import Sampler

from hybridtrain.protocol.spans import Spans
from hybridtrain.worker.client import Client

Order = Callable[[int], Sequence[int]]  # epoch -> indices into the data set


@dataclass(frozen=True)
class Seeded:
    """The order ``DistributedSampler`` would use, unpadded; ``seed`` is ``None``: as it comes."""

    length: int
    seed: int | None

    def __call__(self, epoch: int) -> list[int]:
        if self.seed is None:
            return list(range(self.length))
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return torch.randperm(self.length, generator=generator).tolist()


class Drawn:
    """The user's own sampler, drawn by one worker for everybody (it may be random)."""

    def __init__(self, sampler: Sampler[int], client: Client) -> None:
        self._sampler, self._client = sampler, client

    def __call__(self, epoch: int) -> list[int]:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        mine = list(self._sampler) if self._client.is_leader else None
        return self._client.gather("order of the epoch", mine)[0]


@dataclass(frozen=True)
class Fixed:
    """One order for one epoch, as a checkpoint holds it."""

    indices: tuple[int, ...]

    def __call__(self, epoch: int) -> Sequence[int]:
        return self.indices


@dataclass(frozen=True)
class Begun:
    """One pass that a checkpoint has left half done.

    ``spans`` of ``order`` are still to do; ``batches`` of this pass, number ``lap`` of its epoch,
    have been done.
    """

    epoch: int
    order: Order
    spans: Spans
    batches: int = 0
    lap: int = 0
