"""Host memory that a worker's copies cross the bus from and to, page-locked while it trains."""

from __future__ import annotations

import warnings

import torch

from hybridtrain.memory import Store
from hybridtrain.worker.device import Streams


class PageLocked:
    """A worker's row, what it reads parameters from, and the mean, in whole pages.

    Where that is refused copies are slower, not wrong: it is said what that costs.

    Args:
        streams: of the worker's device.
        store: the shared buffers.
        worker: whose.
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
        """The memory is as it was."""
        for region in self._regions:
            self._streams.unlock(region)
        self._regions = []
