"""One forward and backward on the longest batch before training: out of memory now or never.

Gradients are asked for with ``torch.autograd.grad``, which fills no ``.grad`` and fires no hook of
a parameter, so neither DDP nor our own strategies notice. Random states and buffers are put back.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from hybridtrain.errors import UserError


def rehearse(module: nn.Module, loss: Callable[[], Tensor], batch_size: int, frames: int) -> None:
    """Compute ``loss()`` and its gradient, and drop both.

    If memory does not suffice: a ``UserError`` that says for what batch and what to lower.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    try:
        torch.autograd.grad(loss(), parameters, allow_unused=True)
    except (RuntimeError, MemoryError) as error:
        if not _is_memory(error):
            raise
        raise UserError(
            f"the longest batch ({batch_size} samples of up to {frames} frames) does not fit into"
            f" memory: lower data.batch_size (now {batch_size}), or model.net.width"
        ) from error


def _is_memory(error: BaseException) -> bool:
    """CUDA raises its own class, the CPU allocator a RuntimeError with one of two texts."""
    texts = ("can't allocate memory", "not enough memory", "out of memory")
    known = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, known) or any(text in str(error) for text in texts)


@contextlib.contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Put buffers and the random states of Python, NumPy, CPU and the module's GPU back."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    cuda = {p.device for p in module.parameters() if p.device.type == "cuda"}
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=sorted(cuda, key=str)):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
