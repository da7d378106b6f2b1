"""How Lightning rebuilds a DataLoader, and chooses its sampler."""

from __future__ import annotations

from typing import Any

from lightning_fabric.utilities.data import _reinstantiate_wrapped_cls
from pytorch_lightning.overrides.distributed import _IndexBatchSamplerWrapper
from pytorch_lightning.utilities.data import (
    _dataloader_init_kwargs_resolve_sampler,
    _get_dataloader_init_args_and_kwargs,
)
from torch.utils.data import DataLoader


def data_connector(trainer: Any) -> Any:
    """Lightning's connector, which makes loaders and their samplers."""
    return trainer._data_connector


def gets_our_sampler(trainer: Any, dataloader: Any) -> bool:
    """Whether Lightning would put a ``DistributedSampler`` into this loader."""
    return bool(data_connector(trainer)._requires_distributed_sampler(dataloader))


def takes_a_sampler(dataloader: DataLoader[Any]) -> bool:
    """Whether Lightning can put a sampler into the loader's batch sampler."""
    try:
        _dataloader_init_kwargs_resolve_sampler(dataloader, dataloader.sampler)
    except TypeError:
        return False
    return True


def rebuilt(dataloader: DataLoader[Any], like: DataLoader[Any], batches: Any) -> DataLoader[Any]:
    """A loader of the same class, with the arguments of ``like`` and another batch sampler."""
    args, kwargs = _get_dataloader_init_args_and_kwargs(like, dataloader.sampler)
    kwargs |= {"sampler": None, "batch_sampler": batches, "batch_size": 1, "drop_last": False}
    return _reinstantiate_wrapped_cls(dataloader, *args, **kwargs)


def noting_indices(batches: Any) -> Any:
    """A batch sampler that records the indices of each mini-batch, for prediction writers."""
    return _IndexBatchSamplerWrapper(batches)


def inside(batches: Any) -> Any:
    """The batch sampler inside ``noting_indices``, or the given one."""
    return getattr(batches, "_batch_sampler", batches)


def put_inside(noting: Any, batches: Any) -> None:
    """Replace the batch sampler inside ``noting_indices``."""
    noting._batch_sampler = batches
