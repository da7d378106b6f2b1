"""Memory of the stand-in: blocks that a caching allocator gives out again and again.

A device tensor is a true one of torch's (made through DLPack, whose "extension" device is the one
that a backend of its own gets); its bytes lie in host memory, in a block that only this file and
the kernels know how to reach. A block whose last tensor has died is
filled with bytes that are no number and given out again to the same stream, at once: whoever has a
stream use it still, and has not said so (``record_stream``), finds other values there, as on CUDA.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

GRAIN = 512  # bytes, as CUDA's allocator
_EXTENSION = 12  # DLPack's name of the device type; torch's is PrivateUse1

_CODES = {  # dtype -> DLPack's kind and bits
    torch.bool: (6, 8),
    torch.uint8: (1, 8),
    torch.int8: (0, 8),
    torch.int16: (0, 16),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.float16: (2, 16),
    torch.bfloat16: (4, 16),
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.complex64: (5, 64),
    torch.complex128: (5, 128),
}


@dataclass(eq=False)
class Block:
    """``content``: its bytes, uint8. ``readers``, ``writers``: stream -> its last use."""

    device: int
    stream: int
    content: torch.Tensor
    readers: dict[int, int] = field(default_factory=dict)
    writers: dict[int, int] = field(default_factory=dict)
    recorded: set[int] = field(default_factory=set)

    @property
    def address(self) -> int:
        return self.content.data_ptr()

    def spoil(self) -> None:
        """As if somebody else had written there: NaN as a float of any width, else nonsense."""
        with torch.inference_mode(self.content.is_inference()):
            self.content.fill_(0xFF)


class Allocator:
    """All devices' memory, in one process.

    Args:
        release: called with a block that nobody holds any more; gives it back by ``recycle`` when
            the streams that were recorded are done with it.
        limit: called with a device's number; how many bytes of it there may be in use.
    """

    def __init__(self, release: Callable[[Block], None], limit: Callable[[int], int]) -> None:
        self._release, self._limit = release, limit
        self.n_bytes: dict[int, int] = defaultdict(int)  # in use, of each device
        self.most_bytes: dict[int, int] = defaultdict(int)  # in use at any time
        self._idle: dict[tuple[int, int, int], list[Block]] = defaultdict(list)
        self.used: dict[int, Block] = {}  # address -> block
        self._heads = _Heads()

    def empty(
        self,
        shape: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        place: tuple[int, int],
    ) -> torch.Tensor:
        """A tensor whose memory holds what was left there. ``place``: device and stream."""
        n = extent(shape, stride)
        block = self._block(max(n, 1) * dtype.itemsize, place)
        whole = self._heads.tensor(block, n, dtype)
        return whole if tuple(shape) == (n,) else view(whole, shape, stride, 0)

    def _block(self, n_bytes: int, place: tuple[int, int]) -> Block:
        rounded = -(-n_bytes // GRAIN) * GRAIN
        if self.n_bytes[place[0]] + rounded > self._limit(place[0]):
            asked = f"{rounded / 2**20:.2f} MiB"
            raise torch.OutOfMemoryError(f"stand-in out of memory. Tried to allocate {asked}.")
        idle = self._idle[*place, rounded]
        if idle:
            block = idle.pop()
        else:
            block = Block(*place, torch.empty(rounded, dtype=torch.uint8))
            block.spoil()
        self.used[block.address] = block
        self.n_bytes[block.device] += rounded
        self.most_bytes[block.device] = max(
            self.most_bytes[block.device], self.n_bytes[block.device]
        )
        return block

    def collect(self) -> None:
        """See what nobody holds any more."""
        for block in self._heads.let_go():
            del self.used[block.address]
            self.n_bytes[block.device] -= block.content.numel()
            self._release(block)

    def recycle(self, block: Block) -> None:
        """Nobody uses it any more."""
        block.recorded.clear()
        self._idle[block.device, block.stream, block.content.numel()].append(block)


class _Heads:
    """DLPack's description of each tensor's memory, a row of 64-bit numbers.

    When torch lets go of memory, it calls the function that the row names, wherever it is: Python
    may be in the middle of an exception. So it is one of the C library's, which writes a 0 or a 1
    of four bytes where the row begins, over half of the address; that is looked for afterwards.
    """

    _N = 1 << 16
    _FREE = -1

    def __init__(self) -> None:
        self._rows = np.full((self._N, 10), self._FREE, np.int64)
        self._places = list(range(self._N))[::-1]
        self._blocks: dict[int, Block] = {}
        self._top = 0
        unlock = ctypes.CDLL(None).pthread_spin_unlock
        self._deleter = ctypes.cast(unlock, ctypes.c_void_p).value

    def tensor(self, block: Block, n: int, dtype: torch.dtype) -> torch.Tensor:
        """``n`` elements from the beginning of the block."""
        number = self._places.pop()
        self._top, self._blocks[number] = max(self._top, number + 1), block
        row, (kind, bits) = self._rows[number], _CODES[dtype]
        start = row.ctypes.data
        device, form = block.device << 32 | _EXTENSION, (kind | bits << 8 | 1 << 16) << 32 | 1
        shape, stride = start + 64, start + 72
        row[:] = block.address, device, form, shape, stride, 0, 0, self._deleter, n, 1
        return torch._C._from_dlpack(_capsule(start, b"dltensor", None))

    def let_go(self) -> list[Block]:
        """The blocks whose last tensor has died since the last time."""
        found = np.flatnonzero(self._rows[: self._top, 0] & 0xFFFFFFFF <= 1).tolist()
        self._rows[found, 0] = self._FREE
        self._places += found
        return [self._blocks.pop(number) for number in found]


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to behind the last."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))


def view(
    tensor: torch.Tensor, shape: Sequence[int], stride: Sequence[int], offset: int
) -> torch.Tensor:
    """Another one of the same memory; ``offset`` counts elements from where it begins."""
    return torch._C._dynamo.guards._reinterpret_tensor(
        tensor, shape, stride, offset - tensor.storage_offset()
    )


_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
