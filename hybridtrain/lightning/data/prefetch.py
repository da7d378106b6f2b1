"""The next mini-batch is on the device before the step that runs has ended.

When backward has been queued, the host has nothing to do until the gradients arrive: it takes the
next mini-batch from the loader and queues its copy on a lane of its own. Lightning gets it when it
asks, and the compute lane waits for the copy, not the host. Only where it changes nothing else:
loaders with processes of their own (others would draw random numbers earlier than without this),
whose length is known and that keep no state, and modules that leave the transfer to Lightning.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning_fabric.utilities import move_data_to_device
from pytorch_lightning import LightningDataModule, LightningModule
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch.utils._pytree import tree_leaves

from hybridtrain.lightning.hooks.loop_hooks import training_fetcher
from hybridtrain.lightning.run_context import context_of
from hybridtrain.worker.device import Lane, Streams
from hybridtrain.worker.replica import Replica
from hybridtrain.worker.replica_cuda import CudaReplica

_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class OneAhead(Iterator[Any]):
    """What an iterator gives; the next of it may be fetched before it is asked for."""

    def __init__(self, inner: Iterator[Any]) -> None:
        self._inner = inner
        self._fetched: list[Any] = []

    def fetch(self) -> Any:
        """The next item, once; ``None`` if it is here already, or there is none."""
        if self._fetched:
            return None
        try:
            self._fetched.append(next(self._inner))
        except StopIteration:
            return None
        return self._fetched[0]

    def __next__(self) -> Any:
        return self._fetched.pop() if self._fetched else next(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Ahead:
    """Fetches for one worker.

    Args:
        streams: of its device.
        trainer: of the worker.
    """

    def __init__(self, streams: Streams, trainer: Any) -> None:
        self._streams, self._trainer = streams, trainer
        self._device = context_of(trainer).root_device
        self._batch: Any = None  # on the host
        self._moved: list[Any] = []  # the same on the device, once the lane has begun with it
        self._mark: Any = None
        self._changes_nothing = leaves_transfer_alone(trainer)

    def fetch(self) -> None:
        """Backward has been queued."""
        fetcher = training_fetcher(self._trainer)
        if not self._changes_nothing or not _may_be_asked_early(fetcher):
            return
        if not isinstance(fetcher.iterator, OneAhead):
            fetcher.iterator = OneAhead(fetcher.iterator)
        item = fetcher.iterator.fetch()
        if item is not None:
            self._send(item[0])

    def _send(self, batch: Any) -> None:
        self._batch, self._moved = batch, []
        moved, device = self._moved, self._device
        if not all(map(_is_plain, tree_leaves(batch))):
            # Its tensors cannot be marked as used by the compute lane, so the memory that they
            # leave may be given to this copy while that lane still reads them: wait for it.
            self._streams.wait(Lane.DATA, self._streams.record(Lane.COMPUTE))
        self._streams.do(Lane.DATA, lambda: moved.append(move_data_to_device(batch, device)))
        self._mark = self._streams.record(Lane.DATA)

    def take(self, batch: Any) -> Any:
        """What was made of this mini-batch, if it was; else ``None``."""
        if batch is None or batch is not self._batch:
            return None
        self._streams.wait(Lane.COMPUTE, self._mark)
        (moved,) = self._moved
        for leaf in tree_leaves(moved):
            if isinstance(leaf, torch.Tensor):
                self._streams.keep(Lane.COMPUTE, leaf)
        self._batch, self._moved = None, []
        return moved


def _is_plain(leaf: Any) -> bool:
    """Whether a part of a mini-batch is a tensor, or is not moved at all."""
    return isinstance(leaf, torch.Tensor) or not hasattr(leaf, "to")


def ahead(exchange: Replica, trainer: Any) -> Ahead | None:
    """Where there is something to cross."""
    return Ahead(exchange.streams, trainer) if isinstance(exchange, CudaReplica) else None


def leaves_transfer_alone(trainer: Any) -> bool:
    """Whether a mini-batch is only copied."""
    module, data = trainer.lightning_module, trainer.datamodule
    own = any(is_overridden(hook, module, parent=LightningModule) for hook in _HOOKS)
    own = own or (
        data is not None
        and any(is_overridden(hook, data, parent=LightningDataModule) for hook in _HOOKS)
    )
    return not own and type(trainer.precision_plugin).convert_input is Precision.convert_input


def _may_be_asked_early(fetcher: Any) -> bool:
    """Whether there is another mini-batch, which its loader makes in processes of its own."""
    if getattr(fetcher, "length", None) is None or fetcher.fetched >= fetcher.length:
        return False
    loaders = fetcher.combined_loader.flattened
    apart = all(getattr(loader, "num_workers", 0) > 0 for loader in loaders)
    return apart and not any(hasattr(loader, "state_dict") for loader in loaders)
