"""An anonymous block of shared host memory.

It has no name, so nothing is left behind: the kernel frees it with the last process that maps it,
however that process ends. ``memfd_create`` does not use ``/dev/shm`` (64 MB in a default
container). Reserving the pages at once turns "too big" into an error, instead of a SIGBUS or the
out-of-memory killer in the middle of a step.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Sequence

import torch

from hybridtrain.errors import UserError
from hybridtrain.memory.limits import available_bytes
from hybridtrain.util.anonymous_files import anonymous_descriptor, shared_map

# A cache line, and 16 float32: what the vectorised kernels need for equal bits.
ALIGNMENT_BYTES = 64


def align(n_bytes: int) -> int:
    """Round up to :data:`ALIGNMENT_BYTES`."""
    return -(-n_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Arena:
    """A mapped, nameless file.

    The kernel frees the memory when the arena and all its tensors are gone in every process.

    Args:
        fd: the descriptor; the arena owns and closes it.
        n_bytes: its size.
    """

    def __init__(self, fd: int, n_bytes: int) -> None:
        self.fd = fd
        self.n_bytes = n_bytes
        self._map = shared_map(self, fd, n_bytes)
        weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, n_bytes: int, unused: Sequence[tuple[int, int]] = ()) -> Arena:
        """Make a zero-filled arena of ``n_bytes`` bytes.

        ``unused``: byte ranges, ascending, that are written to rarely or never; their pages are
        not reserved.

        Raises:
            UserError: if the machine does not have that much memory.
        """
        n_bytes = max(align(n_bytes), ALIGNMENT_BYTES)
        fd = anonymous_descriptor()
        try:
            _reserve(fd, n_bytes, unused)
            return cls(fd, n_bytes)
        except OSError as error:
            os.close(fd)
            raise UserError(
                f"{_asked(n_bytes, unused) / 2**20:,.1f} MiB of shared host memory were "
                "asked for parameters and gradients, but the system refused them "
                f"({error.strerror}); "
                + (
                    "raise its limit of file sizes: ulimit -f unlimited"
                    if error.errno == errno.EFBIG
                    else "use fewer workers, a smaller model, or a machine with more memory"
                )
            ) from error

    def tensor(self, offset_bytes: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D tensor over a part of the arena.

        Its storage has the same size, so ``torch.save`` of a view writes only the view.
        """
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset_bytes)

    def words(self, offset_bytes: int, n: int) -> memoryview:
        """(n,) int64 of the arena; reads and writes of one word are atomic."""
        return memoryview(self._map)[offset_bytes : offset_bytes + 8 * n].cast("q")


def _asked(n_bytes: int, unused: Sequence[tuple[int, int]]) -> int:
    return n_bytes - sum(stop - start for start, stop in unused)


def _reserve(fd: int, n_bytes: int, unused: Sequence[tuple[int, int]]) -> None:
    """Set the file's size, and reserve its pages where the system can."""
    available = available_bytes()
    if available is not None and _asked(n_bytes, unused) > available:
        raise OSError(errno.ENOMEM, f"{available / 2**20:,.0f} MiB are available")
    os.ftruncate(fd, n_bytes)
    if hasattr(os, "posix_fallocate"):
        first = 0
        for start, stop in (*unused, (n_bytes, n_bytes)):
            if start > first:
                os.posix_fallocate(fd, first, start - first)
            first = stop
