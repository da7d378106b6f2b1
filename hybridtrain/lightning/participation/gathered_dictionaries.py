"""Gather dictionaries key by key.

Lightning gathers the values of a dictionary in its order, which may be another in each worker.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytorch_lightning as pl

from hybridtrain.lightning.hooks.points import Point, instead_within
from hybridtrain.lightning.run_context import worker_of

_lightnings: Any = pl.LightningModule.all_gather


def gathering_by_keys() -> AbstractContextManager[None]:
    """In this context, modules of this process gather dictionaries key by key."""
    return instead_within(Point.GATHER, pl.LightningModule, by_keys)


def by_keys(
    module: pl.LightningModule, data: Any, group: Any = None, sync_grads: bool = False
) -> Any:
    """Lightning's ``all_gather``; values of a dictionary in the order of its keys, and by them."""
    worker = worker_of(module.trainer) if type(data) is dict else None
    if worker is None:
        return _lightnings(module, data, group, sync_grads)
    found = {}
    for key in sorted(data, key=repr):
        with worker.collectives.within(key):
            found[key] = by_keys(module, data[key], group, sync_grads)
    return {key: found[key] for key in data}
