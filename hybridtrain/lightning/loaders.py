"""Which sampler replaces the one in a user's DataLoader."""

from __future__ import annotations

import os
from functools import cached_property
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.trainer.states import RunningStage
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler

from hybridtrain.client import Client
from hybridtrain.lightning.batches import Key, Scales
from hybridtrain.lightning.samplers import (
    EpochSampler,
    EvaluationSampler,
    Order,
    Plan,
    QueueSampler,
    ShareSampler,
    drawn_order,
    seeded_order,
)


class Loaders:
    """Stands where Lightning would put a ``DistributedSampler``.

    Args:
        trainer: of this worker.
        client: to the server.
        free_running: draw from the shared queue instead of taking fixed shares.
        num_samples_key: the user's word on what tells the number of samples in a batch.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        client: Client,
        free_running: bool,
        num_samples_key: Key | None = None,
    ) -> None:
        self._trainer: Any = trainer
        self._num_samples_key = num_samples_key
        self._client, self._free_running = client, free_running
        self._samplers: list[EpochSampler] = []

    def attach(self) -> None:
        """Take the decision over from the trainer's data connector."""
        connector: Any = self._trainer._data_connector
        connector._resolve_sampler = self.resolve

    def resolve(
        self, dataloader: DataLoader[Any], shuffle: bool, mode: RunningStage | None = None
    ) -> Any:
        """The sampler that this worker's loader gets (Lightning re-creates the loader with it)."""
        connector = self._trainer._data_connector
        if not connector._requires_distributed_sampler(dataloader):
            return dataloader.sampler
        if mode == RunningStage.TRAINING:
            return self._training(dataloader, shuffle and not self._trainer.overfit_batches)
        order = self._order(dataloader, shuffle)
        return EvaluationSampler(order(0), self._client)

    @cached_property
    def _scales(self) -> Scales:
        return Scales(self._trainer.lightning_module, self._num_samples_key)

    def weigh(self, batch: Any) -> float:
        """Samples in the mini-batch that begins.

        Raises:
            UserError: if nobody can tell.
        """
        return self._scales.weigh(batch, self._next_weight())

    def _next_weight(self) -> float | None:
        """Samples in the coming mini-batch, or ``None`` where the samplers cannot tell."""
        weights = [sampler.next_weight() for sampler in self._samplers]
        return weights[0] if len(weights) == 1 else None

    def _training(self, dataloader: DataLoader[Any], shuffle: bool) -> EpochSampler:
        plan = self._plan(dataloader, shuffle)
        epoch = self._trainer.fit_loop.epoch_progress.current.processed
        sampler: EpochSampler
        if self._free_running:
            sampler = QueueSampler(plan, epoch, self._client, len(self._samplers))
        else:
            length = len(dataloader.sampler)  # type: ignore[arg-type]
            sampler = ShareSampler(plan, epoch, self._client, length)
        self._samplers.append(sampler)
        return sampler

    def _plan(self, dataloader: DataLoader[Any], shuffle: bool) -> Plan:
        order = self._order(dataloader, shuffle)
        batches = dataloader.batch_sampler
        if batches is None:
            return Plan(order, 1, drop_last=False, items_are_batches=True)
        size = getattr(batches, "batch_size", 1) or 1
        plain = type(batches) is BatchSampler
        drop_last = bool(getattr(batches, "drop_last", False))
        return Plan(order, size, drop_last, items_are_batches=not plain)

    def _order(self, dataloader: DataLoader[Any], shuffle: bool) -> Order:
        sampler: Sampler[int] = dataloader.sampler  # type: ignore[assignment]
        if isinstance(sampler, SequentialSampler) or _is_plain_random(sampler):
            seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
            return seeded_order(len(dataloader.dataset), seed, shuffle)  # type: ignore[arg-type]
        return drawn_order(sampler, self._client)


def _is_plain_random(sampler: object) -> bool:
    return (
        isinstance(sampler, RandomSampler)
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    )
