"""Beside a device's computation: copies on streams of their own, in the right order.

``streams`` says what is needed of a device, ``cuda`` does it; gradients go ``outgoing``, parameters
``incoming``, and nothing reads what it has not waited for (tests bring a device that sees to that).
"""

from collections.abc import Callable

import torch

from hybridtrain.worker.device.cuda import CudaStreams
from hybridtrain.worker.device.incoming import Incoming
from hybridtrain.worker.device.outgoing import Outgoing, part_bytes
from hybridtrain.worker.device.streams import Lane, Streams

__all__ = ["KINDS", "Incoming", "Lane", "Outgoing", "Streams", "part_bytes"]

# Type of a device that workers compute on apart from the parameters -> its streams.
KINDS: dict[str, Callable[[torch.device], Streams]] = {"cuda": CudaStreams}
