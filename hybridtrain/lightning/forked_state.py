"""What a worker process has from its parent, and must not keep."""

from __future__ import annotations

import torch
from torch.distributed import distributed_c10d


@torch.no_grad()
def stop_sharing(module: torch.nn.Module) -> None:
    """Give a module that was sent to this process memory of its own.

    Whatever tensors are sent to several processes, torch puts where all of them write to it.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.clone()


def forget_process_group() -> None:
    """Leave a default process group that a forked worker has inherited (from ddp, run before).

    It has no peers here, and with one Lightning would broadcast on every mini-batch.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        distributed_c10d.GroupMember.WORLD = None
