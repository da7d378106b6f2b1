"""Limits of this machine: free memory, ``/dev/shm``, descriptors, the memory of GPUs.

Nothing here calls CUDA: a process that has initialised it can no longer fork.

Linux overcommits memory. Reserving pages of a shared file that is too large does not fail; the
out-of-memory killer ends a process instead. So :func:`available_bytes` is read first.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")  # a container sees its own group here
_SHARED = Path("/dev/shm")
_DESCRIPTORS = Path("/proc/self/fd")


def available_bytes() -> int | None:
    """Memory that this machine and this container can allocate now; ``None`` if unknown."""
    known = [n for n in (_of_machine(), _of_container()) if n is not None]
    return min(known, default=None)


def check_available(n_bytes: int) -> None:
    """Raises ``OSError`` if it is known that there is not so much memory."""
    available = available_bytes()
    if available is not None and n_bytes > available:
        raise OSError(errno.ENOMEM, f"{available / 2**20:,.0f} MiB are available")


def _of_machine() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if "MemAvailable" in line), None)


def _of_container() -> int | None:
    """The limit of the control group (version 2), less the memory in use that cannot be dropped."""
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such group, or no limit ("max")
        return None
    return max(0, limit - used + int(stat.get("inactive_file", 0)))


def container_cores() -> float | None:
    """Cores' worth of time that the control group (version 2) has; ``None``: without a limit."""
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # no such group, or "max"
        return None


def shared_memory_bytes() -> int | None:
    """Free bytes of ``/dev/shm``; ``None`` where there is none."""
    try:
        found = os.statvfs(_SHARED)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def open_descriptors() -> int:
    """How many descriptors this process has open; a guess where there is no ``/proc``."""
    try:
        return sum(1 for _ in _DESCRIPTORS.iterdir())
    except OSError:
        return 16


def allow_descriptors(wanted: int) -> tuple[bool, int]:
    """Raise the limit of open descriptors to ``wanted``; returns success and the limit now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return True, wanted
        return False, soft
    return True, soft


class Gpu(NamedTuple):
    """Total memory, and the major number of the compute capability; 0 where unknown."""

    n_bytes: int
    major: int


def largest_device_bytes() -> int | None:
    """Total memory of this machine's largest GPU, if known."""
    return max((gpu.n_bytes for gpu in gpus() if gpu.n_bytes), default=None)


def gpus() -> list[Gpu]:
    """This machine's GPUs in the order of NVML; none where NVML is missing."""
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


def named_gpus(environment: Mapping[str, str] = os.environ) -> list[str] | None:
    """The names in ``CUDA_VISIBLE_DEVICES`` (numbers, UUIDs, parts); ``None``: it is not set."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    return None if named is None else [name.strip() for name in named.split(",")]


def _gpu(library: ctypes.CDLL, number: int) -> Gpu:
    device = ctypes.c_void_p()
    memory = (ctypes.c_ulonglong * 3)()  # nvmlMemory_t: total, free, used bytes
    if library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device)) != 0:
        return Gpu(0, 0)
    told = library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0
    major, minor = ctypes.c_int(), ctypes.c_int()
    capability = library.nvmlDeviceGetCudaComputeCapability
    known = capability(device, ctypes.byref(major), ctypes.byref(minor)) == 0
    return Gpu(memory[0] if told else 0, major.value if known else 0)
