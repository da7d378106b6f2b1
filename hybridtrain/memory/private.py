"""Memory that only this process works on: an optimizer's state in the server.

Not shared, so it may lie on huge pages, which the kernel rarely gives to shared memory
(``shmem_enabled`` is ``never`` by default, while ``enabled`` is ``madvise`` or ``always``). A pass
over parameters, rows and state walks through many arrays at once, and with pages of 2 MiB it finds
them without asking the page table: 4 to 5 % at 10 to 100 million parameters, one thread.
"""

from __future__ import annotations

import errno
import mmap
from contextlib import suppress

import torch

from hybridtrain.errors import UserError
from hybridtrain.memory.arena import align
from hybridtrain.memory.available import available_bytes


def private(count: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """So many tensors of zeros, each (numel,), one behind the other.

    Raises:
        UserError: if the machine has not that much memory.
    """
    if not count * numel:
        return [torch.zeros(numel, dtype=dtype) for _ in range(count)]
    stride = align(numel * dtype.itemsize)
    memory = _mapped(count * stride)
    found = [
        torch.frombuffer(memory, dtype=dtype, count=numel, offset=place * stride)
        for place in range(count)
    ]
    for each in found:
        each.zero_()  # takes the pages now, not in the middle of a step
    return found


def _mapped(n_bytes: int) -> mmap.mmap:
    try:
        available = available_bytes()
        if available is not None and n_bytes > available:
            raise OSError(errno.ENOMEM, f"{available / 2**20:,.0f} MiB are available")
        memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise UserError(
            f"{n_bytes / 2**20:,.0f} MiB of host memory were asked for an optimizer's state, but "
            f"the system refused them ({error.strerror}); use an optimizer that keeps less, "
            "a smaller model, or a machine with more memory"
        ) from error
    with suppress(OSError, AttributeError):  # a kernel without them, or not Linux
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
