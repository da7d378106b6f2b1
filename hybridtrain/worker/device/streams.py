"""What is needed of a device: lanes that work side by side, and marks to wait for.

A *lane* does its work in the order in which it was queued; two lanes know nothing of one another
but by marks. ``COMPUTE`` is the lane that forward and backward run on: whichever stream is current
where it is named, as autograd may run a part of backward on another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Protocol

import torch


class Lane(Enum):
    """What runs beside what."""

    COMPUTE = "compute"
    OUT = "out"  # gradients, to the host
    BACK = "back"  # parameters, to the device
    DATA = "data"  # mini-batches, to the device


class Streams(Protocol):
    """One device, as one worker uses it. A *mark* is whatever ``record`` returns."""

    def current(self) -> Any:
        """The stream that ``COMPUTE`` names now; it can be hashed."""
        ...

    def record(self, lane: Lane, stream: Any = None) -> Any:
        """A mark behind all that the lane, or a stream that was ``current``, has been given."""
        ...

    def wait(self, lane: Lane, mark: Any) -> None:
        """What the lane is given from now on comes after the mark. The host does not wait."""
        ...

    def synchronise(self, mark: Any) -> None:
        """The host waits for the mark."""
        ...

    def copy(
        self, lane: Lane, destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> None:
        """Queue copies between host and device, of equal shapes.

        Another dtype is converted on the device, to nearest even. The sources' memory is kept until
        the copies are made; its values must be, by whoever queues them. Whoever queues copies to
        the device keeps the destinations.
        """
        ...

    def do(self, lane: Lane, work: Callable[[], Any]) -> None:
        """Queue work on tensors of the device, which live as long as the lane may need them."""
        ...

    def keep(self, lane: Lane, tensor: torch.Tensor) -> None:
        """The lane uses a device tensor that another lane has made: not to be freed before."""
        ...

    def lock(self, region: torch.Tensor) -> str:
        """Page-lock host memory, so that copies run by themselves; else the reason why not."""
        ...

    def unlock(self, region: torch.Tensor) -> None:
        """Undo it."""
        ...
