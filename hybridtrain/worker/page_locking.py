"""Page-lock the host memory that a worker copies to and from its GPU."""

from __future__ import annotations

import warnings

import torch

from hybridtrain.memory import Store
from hybridtrain.worker.device import Streams


class PageLocked:
    """A worker's row, its parameters and the mean, in whole pages.

    If the system refuses, copies are slower, and a warning says how much.

    Args:
        streams: of the worker's device.
        store: the shared buffers.
        worker: the number of the worker.
    """

    def __init__(self, streams: Streams, store: Store, worker: int) -> None:
        self._streams = streams
        self._regions: list[torch.Tensor] = []
        places = [store.region_of_gradients(worker), store.region_of_parameters(worker)]
        if store.averaging:
            places.append(store.region_of_means())
        refused, reason = 0, ""
        for start, stop in places:
            region = store.arena.tensor(start, stop - start, torch.uint8)
            if problem := streams.lock(region):
                refused, reason = refused + region.nbytes, problem
            else:
                self._regions.append(region)
        if refused:
            warnings.warn(
                f"{refused / 2**20:,.0f} MiB of host memory could not be page-locked for worker "
                f"{worker} ({reason}), so copies to and from its device hold it up and take "
                "several times as long; raise the limit of locked memory (ulimit -l), or use fewer "
                "workers or a smaller model",
                stacklevel=3,
            )

    def release(self) -> None:
        """Unlock the memory."""
        for region in self._regions:
            self._streams.unlock(region)
        self._regions = []
