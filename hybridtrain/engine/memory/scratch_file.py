"""Send data between processes of a run: in a nameless file that the other maps, or as bytes.

It is no checkpoint, so user code that watches or replaces ``torch.save`` does not see it.
"""

from __future__ import annotations

import io
import os
import pickle
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.serialization import save

from hybridtrain.util.anonymous_files import anonymous_descriptor

_OF_PROCESSES = Path("/proc/self/fd")


class Scratch:
    """Receives what is too large for a message. Freed with the last tensor loaded from it.

    ``path``: for the other process to open; empty where there is no ``/proc``.

    Args:
        apart: the other process may be on another host: there is no file.
    """

    def __init__(self, apart: bool = False) -> None:
        self._fd = anonymous_descriptor() if _OF_PROCESSES.is_dir() and not apart else -1
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}" if self._fd >= 0 else ""
        self._closed = weakref.finalize(self, os.close, self._fd) if self._fd >= 0 else None

    def close(self) -> None:
        """Close the descriptor; loaded tensors stay valid."""
        if self._closed is not None:
            self._closed()


def fill(path: str, content: Any) -> bytes:
    """Write ``content`` to a scratch file; if that fails, return it as bytes."""
    if path:
        try:
            with Path(path).open("wb") as file:
                save(content, file)
            return b""
        except (OSError, RuntimeError):  # no memory left, or the asking process has ended
            pass
    return as_bytes(content)


def as_bytes(content: Any) -> bytes:
    """Serialise with ``torch.save``."""
    buffer = io.BytesIO()
    save(content, buffer)
    return buffer.getvalue()


class _TensorPickler(pickle.Pickler):
    """Pickles tensors by their bytes: torch's way goes by ``torch.save``, and by whole storages."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or obj.requires_grad or not _is_plain(obj):
            return NotImplemented
        content = obj.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (content, obj.dtype, obj.shape)


def _is_plain(tensor: torch.Tensor) -> bool:
    flipped = tensor.is_conj() or tensor.is_neg() or tensor.is_quantized
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and not flipped


def _tensor(content: bytes, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)


def pickled(item: Any) -> bytes:
    """A pickle for another process."""
    buffer = io.BytesIO()
    _TensorPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(item)
    return buffer.getvalue()


def read(path: str, rest: bytes = b"") -> Any:
    """Load what :func:`fill` has written to ``path``, or :func:`as_bytes` has made as ``rest``.

    Tensors are loaded to the CPU, since the other process may have used another device; those of a
    file are views of it.
    """
    # From the parent or another worker of this run, so not a stranger's pickle; states of modules
    # may hold any object (get_extra_state).
    if rest:
        return torch.load(io.BytesIO(rest), map_location="cpu", weights_only=False)
    return torch.load(path, map_location="cpu", weights_only=False, mmap=True)
