"""Copies between host and GPU on side streams, overlapped with computation.

``streams`` is the interface of a device, ``cuda`` implements it; ``transfers`` copies gradients to
the host and parameters to the device, ``staged`` those of the next step. Tests use a device that
detects a read without a wait.
"""

from collections.abc import Callable

import torch

from hybridtrain.engine.worker.device.cuda import CudaStreams
from hybridtrain.engine.worker.device.staged import Staged
from hybridtrain.engine.worker.device.streams import Lane, Streams
from hybridtrain.engine.worker.device.transfers import Incoming, Outgoing, PageLocked, part_bytes

__all__ = ["KINDS", "Incoming", "Lane", "Outgoing", "PageLocked", "Staged", "Streams", "part_bytes"]

# Device type, other than the host's -> its streams.
KINDS: dict[str, Callable[[torch.device], Streams]] = {"cuda": CudaStreams}
