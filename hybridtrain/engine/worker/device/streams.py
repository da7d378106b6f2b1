"""The interface of a device: concurrent lanes, ordered by marks.

A *lane* runs its work in the order in which it was queued, like a CUDA stream; marks, like CUDA
events, order two lanes. ``COMPUTE`` runs forward and backward: it is the current stream of the
caller, because autograd may run a part of backward on another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Protocol

import torch


class Lane(Enum):
    """Work of different lanes runs concurrently."""

    COMPUTE = "compute"
    OUT = "out"  # gradients, to the host
    BACK = "back"  # parameters, to the device
    DATA = "data"  # mini-batches, to the device


class Streams(Protocol):
    """The lanes of one worker on one device. A *mark* is what ``record`` returns."""

    def current(self) -> Any:
        """The current stream of ``COMPUTE``, hashable."""

    def record(self, lane: Lane, stream: Any = None) -> Any:
        """A mark after all work queued on the lane, or on a stream that was ``current``."""

    def wait(self, lane: Lane, mark: Any) -> None:
        """Let the lane's later work wait for the mark. The host does not wait."""

    def synchronise(self, mark: Any) -> None:
        """The host waits for the mark."""

    def copy(
        self, lane: Lane, destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> None:
        """Queue copies between host and device, of equal shapes.

        Another dtype is converted on the device, to nearest even. The sources' memory is kept until
        the copies are made; the caller must not change their values before, and must keep
        destinations on the device alive.
        """

    def do(self, lane: Lane, work: Callable[[], Any]) -> None:
        """Queue work on tensors of the device, which the caller keeps alive."""

    def keep(self, lane: Lane, tensor: torch.Tensor) -> None:
        """Keep a device tensor of another lane alive until this lane's work is done."""

    def lock(self, region: torch.Tensor) -> str:
        """Page-lock host memory for asynchronous copies; returns the reason of a failure."""

    def unlock(self, region: torch.Tensor) -> None:
        """Undo ``lock``."""
