"""Copy the next mini-batch to the device while the current step runs.

After backward is queued, the host is idle until the gradients arrive: it takes the next mini-batch
from the loader and queues its copy on a separate stream. The compute stream waits for the copy, not
the host. Only where nothing else changes: loaders with worker processes (others would draw random
numbers earlier), of known length and without state, and modules that leave the transfer to
Lightning.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning_fabric.utilities import move_data_to_device
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch.utils._pytree import tree_leaves

from hybridtrain.engine.worker.device import Lane, Streams
from hybridtrain.lightning.hooks.loop_hooks import training_fetcher

_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class OneAhead(Iterator[Any]):
    """An iterator whose next item may be fetched early."""

    def __init__(self, inner: Iterator[Any]) -> None:
        self._inner = inner
        self._fetched: list[Any] = []

    def fetch(self) -> Any:
        """Fetch the next item; ``None`` if it is fetched already, or there is none."""
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
    """Prefetches for one worker.

    Args:
        streams: of its device.
        device: of the worker.
        trainer: of the worker.
    """

    def __init__(self, streams: Streams, device: torch.device, trainer: Any) -> None:
        self._streams, self._device, self._trainer = streams, device, trainer
        self._batch: Any = None  # on the host
        self._moved: list[Any] = []  # the same on the device, once its copy has begun
        self._mark: Any = None
        self._changes_nothing = leaves_transfer_alone(trainer)

    def fetch(self) -> None:
        """Backward is queued: fetch the next mini-batch and queue its copy."""
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
            # Tensors inside cannot be marked as used by the compute stream, so their freed memory
            # may be reused by this copy while that stream still reads it: wait for the stream.
            self._streams.wait(Lane.DATA, self._streams.record(Lane.COMPUTE))
        self._streams.do(Lane.DATA, lambda: moved.append(move_data_to_device(batch, device)))
        self._mark = self._streams.record(Lane.DATA)

    def take(self, batch: Any) -> Any:
        """The copy of this mini-batch on the device; ``None``: it was not prefetched."""
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
    """Whether a leaf of a mini-batch is a tensor, or is not moved at all."""
    return isinstance(leaf, torch.Tensor) or not hasattr(leaf, "to")


def leaves_transfer_alone(trainer: Any) -> bool:
    """Whether the transfer of a mini-batch is a plain copy."""
    users = (trainer.lightning_module, trainer.datamodule)  # there may be no data module
    own = any(is_overridden(hook, each) for each in users for hook in _HOOKS)
    return not own and type(trainer.precision_plugin).convert_input is Precision.convert_input


def _may_be_asked_early(fetcher: Any) -> bool:
    """Whether a mini-batch follows, which the loader makes in worker processes."""
    if getattr(fetcher, "length", None) is None or fetcher.fetched >= fetcher.length:
        return False
    loaders = fetcher.combined_loader.flattened
    apart = all(getattr(loader, "num_workers", 0) > 0 for loader in loaders)
    return apart and not any(hasattr(loader, "state_dict") for loader in loaders)
