"""Parameters of the next step, copied to spare device memory while the device computes.

Where an update is made while workers compute (:mod:`hybridtrain.engine.memory.turns`), a worker's
parameters stay as they are until its release, and the masters that the update steps come to copies
of them on the device. The copies wait for nothing that the device computes, and the release costs
one copy within the device.

The price is one more copy of the trained parameters on each device for each worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hybridtrain.engine.worker.device.streams import Lane, Streams


class Staged:
    """Copies of parameters on their device.

    Args:
        streams: of the device.
        parameters: on the device.
        sources: their next values in host memory, page-locked.
    """

    def __init__(
        self,
        streams: Streams,
        parameters: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
    ) -> None:
        self._streams, self._parameters, self._sources = streams, parameters, sources
        self._copies: dict[int, torch.Tensor] = {}
        self._last: Any = None  # the mark after all copies from the host

    def reserve(self, numbers: Iterable[int]) -> None:
        """Allocate the copies of these parameters, if they have none."""
        missing = [number for number in numbers if number not in self._copies]
        for number in missing:
            self._copies[number] = torch.empty_like(self._parameters[number].detach())
        if missing:
            self._free()

    def _free(self) -> None:
        """What is copied from the host from now on waits for the work that is queued now."""
        self._streams.wait(Lane.BACK, self._streams.record(Lane.COMPUTE))

    def bring(self, numbers: Sequence[int]) -> None:
        """Queue the copies of these parameters' sources."""
        if numbers:
            self.reserve(numbers)
            copies = [self._copies[number] for number in numbers]
            self._streams.copy(Lane.BACK, copies, [self._sources[number] for number in numbers])
            self._last = self._streams.record(Lane.BACK)

    def settle(self) -> None:
        """The host waits for all copies; afterwards their sources may change."""
        if self._last is not None:
            self._streams.synchronise(self._last)

    def take(self, numbers: Sequence[int]) -> None:
        """These parameters become what has been brought."""
        self._hold_compute()
        own, copies = self._pairs(numbers)
        self._streams.copy(Lane.COMPUTE, own, copies)
        self._free()

    def swap(self, numbers: Sequence[int]) -> None:
        """These parameters become what has been brought, and the copies what they were."""
        self._hold_compute()
        for own, copy in zip(*self._pairs(numbers), strict=True):
            before = own.clone()
            self._streams.copy(Lane.COMPUTE, [own], [copy])
            self._streams.copy(Lane.COMPUTE, [copy], [before])
        self._free()

    def copy_of(self, number: int) -> torch.Tensor:
        """The parameter's copy, to be read by queued work."""
        self._hold_compute()
        return self._copies[number]

    def _hold_compute(self) -> None:
        if self._last is not None:
            self._streams.wait(Lane.COMPUTE, self._last)

    def _pairs(self, numbers: Sequence[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        own = [self._parameters[number].detach() for number in numbers]
        return own, [self._copies[number] for number in numbers]
