"""Who trains on which samples: fixed shares in lock-step, a shared queue when running freely.

The order of an epoch is the same in every worker: a permutation seeded with ``seed + epoch`` (what
``DistributedSampler`` uses), or the order of the user's own sampler as worker 0 has drawn it. The
union of the workers' mini-batches of one step is a slice of that order, whatever the number of
workers; nothing is repeated and nothing is left out. Where a share runs empty before the others, it
is filled up with a sample that has no weight, so that all workers take the same number of steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import Sampler

from hybridtrain.client import Client

Order = Callable[[int], list[int]]  # epoch -> indices into the data set


@dataclass(frozen=True)
class Plan:
    """What the sampler of one loader needs to know.

    ``batch_size`` is the worker's own; 1 where the data set's items are whole mini-batches.
    """

    order: Order
    batch_size: int
    drop_last: bool
    items_are_batches: bool = False


class EpochSampler(Sampler[int]):
    """A sampler that knows its epoch, and what the mini-batches it has handed out weigh."""

    def __init__(self, plan: Plan, epoch: int) -> None:
        self.plan = plan
        self.epoch = epoch
        self._weights: deque[float | None] = deque()

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning at the start of every epoch."""
        self.epoch = epoch

    def next_weight(self) -> float | None:
        """Samples in the next mini-batch; ``None``: look at the mini-batch itself. In order."""
        return self._weights.popleft() if self._weights else None

    def _record(self, n_samples: int) -> None:
        unknown = self.plan.items_are_batches and n_samples > 0
        self._weights.append(None if unknown else float(n_samples))


class ShareSampler(EpochSampler):
    """Worker ``worker``'s fixed share of every global mini-batch: every W-th of its samples."""

    def __init__(self, plan: Plan, epoch: int, client: Client, length: int) -> None:
        super().__init__(plan, epoch)
        self._worker, self._n_workers = client.worker, client.n_workers
        self._length = self._usable(length)

    def _usable(self, length: int) -> int:
        global_batch = self.plan.batch_size * self._n_workers
        return length // global_batch * global_batch if self.plan.drop_last else length

    def _own(self) -> int:
        """How many samples are this worker's."""
        return len(range(self._worker, self._length, self._n_workers))

    def _steps(self) -> int:
        return -(-self._length // (self.plan.batch_size * self._n_workers))

    def __len__(self) -> int:
        """Indices to come, fillers included: every worker takes the same number of steps."""
        missing_steps = self._steps() - -(-self._own() // self.plan.batch_size)
        return self._own() + missing_steps

    def __iter__(self) -> Iterator[int]:
        order = self.plan.order(self.epoch)[: self._length]
        mine = order[self._worker :: self._n_workers]
        self._weights.clear()
        for start in range(0, len(mine), self.plan.batch_size):
            batch = mine[start : start + self.plan.batch_size]
            self._record(len(batch))
            yield from batch
        for _ in range(len(self) - len(mine)):
            self._weights.append(0.0)
            yield order[0]


class QueueSampler(EpochSampler):
    """Mini-batches drawn one by one from the server's queue. It has no length, on purpose.

    Lightning believes a length, and would miss validation and the last step if it were only an
    upper bound.
    """

    def __init__(self, plan: Plan, epoch: int, client: Client, loader: int) -> None:
        super().__init__(plan, epoch)
        self._client, self._loader = client, loader

    def __iter__(self) -> Iterator[int]:
        order, size = self.plan.order(self.epoch), self.plan.batch_size
        n_batches = len(order) // size if self.plan.drop_last else -(-len(order) // size)
        self._weights.clear()
        while True:
            ticket = self._client.draw(self._loader, self.epoch, n_batches)
            if ticket.batch is None:
                return
            batch = order[ticket.batch * size : (ticket.batch + 1) * size]
            self._record(len(batch) if ticket.counts else 0)
            yield from batch


class EvaluationSampler(Sampler[int]):
    """Every W-th sample, none twice, in the order of the user's sampler.

    Where there are fewer samples than workers every worker sees them all, because Lightning skips
    the evaluation of a worker that has none and would leave the others waiting.
    """

    def __init__(self, indices: list[int], client: Client) -> None:
        whole = len(indices) < client.n_workers
        self._indices = indices if whole else indices[client.worker :: client.n_workers]

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)


def seeded_order(length: int, seed: int, shuffle: bool) -> Order:
    """The order ``DistributedSampler`` would use, unpadded."""

    def order(epoch: int) -> list[int]:
        if not shuffle:
            return list(range(length))
        generator = torch.Generator().manual_seed(seed + epoch)
        return torch.randperm(length, generator=generator).tolist()

    return order


def drawn_order(sampler: Sampler[int], client: Client) -> Order:
    """The user's own sampler, drawn by worker 0 for everybody (it may be random)."""

    def order(epoch: int) -> list[int]:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        mine = list(sampler) if client.worker == 0 else None
        return client.gather("order of the epoch", mine)[0]

    return order
