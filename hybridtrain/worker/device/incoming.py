"""Parameters on their way from host memory to the device.

The copies run on a lane of their own; the compute lane waits for all of them before it goes on.
They may be queued in parts, while the server still steps the rest, and are each queued once per
update then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hybridtrain.worker.device.streams import Lane, Streams


class Incoming:
    """Brings parameters to the device.

    Args:
        streams: of the device.
        parameters: on the device.
        sources: their values in host memory, page-locked.
    """

    def __init__(
        self,
        streams: Streams,
        parameters: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
    ) -> None:
        self._streams, self._sources = streams, sources
        self._originals = list(parameters)
        self._last: Any = None  # the mark behind all copies
        self._find_places()

    def _find_places(self) -> None:
        """Where the parameters lie: what is copied goes there."""
        self._addresses = [p.data_ptr() for p in self._originals]
        self._parameters = [p.detach() for p in self._originals]

    def copy(self, numbers: Sequence[int], after: Callable[[Sequence[int]], Any] = len) -> None:
        """Queue the copies of these, behind all that uses them so far.

        ``after``: what follows them on their lane; it is called with the numbers.
        """
        if not numbers:
            return
        if [p.data_ptr() for p in self._originals] != self._addresses:  # ``.data`` was replaced
            self.hold_compute()  # or who gets the old memory would race with a copy to it
            self._find_places()
        self._streams.wait(Lane.BACK, self._streams.record(Lane.COMPUTE))  # the old are in use
        own, sources = self._parameters, self._sources
        self._streams.copy(Lane.BACK, [own[n] for n in numbers], [sources[n] for n in numbers])
        after(numbers)
        self._last = self._streams.record(Lane.BACK)

    def hold_compute(self) -> None:
        """What the compute lane is given from now on comes after all copies."""
        if self._last is not None:
            self._streams.wait(Lane.COMPUTE, self._last)

    def settle(self) -> None:
        """The host waits until all copies are made: what they are made from may change now."""
        self.hold_compute()
        if self._last is not None:
            self._streams.synchronise(self._last)
