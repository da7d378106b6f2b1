"""How much of what a machine shares out there is: /dev/shm, descriptors, the memory of devices.

Everything is asked of the system, nothing of CUDA: whoever initialises it can no longer fork.
"""

from __future__ import annotations

import ctypes
import os
import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_SHARED = Path("/dev/shm")
_DESCRIPTORS = Path("/proc/self/fd")


def shared_memory_bytes() -> int | None:
    """What may still be written to ``/dev/shm``; ``None`` where there is none."""
    try:
        found = os.statvfs(_SHARED)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def open_descriptors() -> int:
    """Of this process; a guess where the system does not tell."""
    try:
        return sum(1 for _ in _DESCRIPTORS.iterdir())
    except OSError:
        return 16


def allow_descriptors(wanted: int) -> tuple[bool, int]:
    """See that this process may open that many, if it may decide so; and the limit now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return True, wanted
        return False, soft
    return True, soft


class _Memory(ctypes.Structure):
    """``nvmlMemory_t``, bytes."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


@dataclass(frozen=True, slots=True)
class Gpu:
    """All memory of one, and its compute capability; 0 where it is not told."""

    n_bytes: int
    major: int


def largest_device_bytes() -> int | None:
    """All memory of this machine's largest GPU, if that is known."""
    return max((gpu.n_bytes for gpu in gpus() if gpu.n_bytes), default=None)


def gpus() -> list[Gpu]:
    """This machine's, by NVIDIA's management library, in its order; none where it is not there."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if library.nvmlInit_v2() != 0:
        return []
    try:
        count = ctypes.c_uint()
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        return [_gpu(library, number) for number in range(count.value)]
    finally:
        library.nvmlShutdown()


def _gpu(library: ctypes.CDLL, number: int) -> Gpu:
    device, memory = ctypes.c_void_p(), _Memory()
    if library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device)) != 0:
        return Gpu(0, 0)
    told = library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0
    major, minor = ctypes.c_int(), ctypes.c_int()
    capability = library.nvmlDeviceGetCudaComputeCapability
    known = capability(device, ctypes.byref(major), ctypes.byref(minor)) == 0
    return Gpu(int(memory.total) if told else 0, major.value if known else 0)
