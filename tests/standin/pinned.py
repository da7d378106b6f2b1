"""Page-locked memory that torch hands out itself (``pin_memory``).

Torch asks a device type for its allocator in C++ only, so in a process that has initialised the
stand-in the functions that lead there are others. A piece is given out again when nobody holds it,
nor a copy that is still to be made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._device import _device_constructors

from tests.standin.state import state

_pieces: list[torch.Tensor] = []  # (bytes,) uint8 each, for ever
_empty = torch.empty


def _piece(n_bytes: int) -> torch.Tensor:
    for piece in _pieces:
        storage = piece.untyped_storage()
        if piece.nbytes == n_bytes and torch._C._storage_Use_Count(storage._cdata) <= 2:
            return piece
    piece = _empty(n_bytes, dtype=torch.uint8)
    state().locked[piece.data_ptr()] = n_bytes
    _pieces.append(piece)
    return piece


def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
    """As ``torch.empty``."""
    if not pin_memory:
        return _empty(*args, **kwargs)
    like = _empty(*args, **kwargs | {"device": "meta"})
    content = _piece(max(like.nbytes, 1)).untyped_storage()
    return _empty(0, dtype=like.dtype).set_(content, 0, like.shape, like.stride())


def pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    """As ``Tensor.pin_memory``."""
    return empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
    """As ``Tensor.is_pinned``."""
    return tensor.device.type == "cpu" and state().is_locked(tensor)


def register() -> None:
    """For the rest of this process."""
    _device_constructors()  # remembers torch's own, of which ours makes use
    torch.empty = empty
    torch.Tensor.pin_memory, torch.Tensor.is_pinned = pin_memory, is_pinned
