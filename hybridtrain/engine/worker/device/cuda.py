"""CUDA streams and events, and page-locked host memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from hybridtrain.engine.worker.device.streams import Lane


class CudaStreams:
    """The streams of one worker on one GPU, or on a device with a module like ``torch.cuda``.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = torch.get_device_module(device)  # torch.cuda, or another kind's equivalent
        self._side = {lane: self._cuda.Stream(device) for lane in Lane if lane is not Lane.COMPUTE}

    def _stream(self, lane: Lane) -> Any:
        if lane is Lane.COMPUTE:
            return self._cuda.current_stream(self._device)
        return self._side[lane]

    def current(self) -> Any:
        return self._stream(Lane.COMPUTE)

    def record(self, lane: Lane, stream: Any = None) -> Any:
        event = self._cuda.Event(blocking=True)  # leave the cores to the update
        event.record(stream or self._stream(lane))
        return event

    def wait(self, lane: Lane, mark: Any) -> None:
        self._stream(lane).wait_event(mark)

    def synchronise(self, mark: Any) -> None:
        mark.synchronize()

    @torch.no_grad()
    def copy(
        self, lane: Lane, destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> None:
        pairs = [pair for pair in zip(destinations, sources, strict=True) if pair[0].numel()]
        if not pairs:
            return
        stream = self._stream(lane)
        with self._cuda.stream(stream):
            made = [_like(destination, source) for destination, source in pairs]
            torch._foreach_copy_([each for each, _ in pairs], made, non_blocking=True)
        for source in sources:
            if source.device.type != "cpu":
                source.record_stream(stream)

    def do(self, lane: Lane, work: Callable[[], Any]) -> None:
        with torch.no_grad(), self._cuda.stream(self._stream(lane)):
            work()

    def keep(self, lane: Lane, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cpu":
            tensor.record_stream(self._stream(lane))

    def lock(self, region: torch.Tensor) -> str:
        if not region.numel():
            return ""  # CUDA refuses an empty region
        code = int(self._cuda.cudart().cudaHostRegister(region.data_ptr(), region.nbytes, 0))
        if code != 0:
            _forget_last_error()
            return f"CUDA error {code}"
        return ""

    def unlock(self, region: torch.Tensor) -> None:
        if region.numel():
            self._cuda.cudart().cudaHostUnregister(region.data_ptr())


def forbids_fork() -> bool:
    """Whether this process has initialised CUDA, so that forked children could not use it.

    ``torch.cuda.is_initialized`` is not enough: counting devices without NVML (``is_available``
    before Lightning is imported, or devices named by UUID), a check for CUDA graphs (in the step of
    torch's optimizers) or another library initialise the driver without torch's knowledge. So a
    forked child tries.
    """
    if torch.cuda.is_initialized():
        return True
    if not hasattr(os, "fork") or not any("libcuda.so" in line for line in _maps()):
        return False
    reads, writes = os.pipe()  # not the exit status, which a program that ignores SIGCHLD loses
    child = os.fork()
    if child == 0:
        with suppress(OSError, AttributeError):
            if not torch.cuda._is_in_bad_fork() and ctypes.CDLL("libcuda.so.1").cuInit(0) == 0:
                os.write(writes, b"allowed")
        os._exit(0)
    os.close(writes)
    with open(reads, "rb") as pipe:  # noqa: PTH123  (it has no path)
        allowed = pipe.read() == b"allowed"
    with suppress(ChildProcessError):
        os.waitpid(child, 0)
    return not allowed


def _maps() -> list[str]:
    """The memory mappings of this process."""
    with suppress(OSError):
        return Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return []


def _like(destination: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The source in the destination's dtype and stride, converted on the device.

    Torch would convert in host memory, and block the host.
    """
    same = source.dtype == destination.dtype and source.stride() == destination.stride()
    if same or source.device.type == "cpu":
        return source
    shape, stride = destination.shape, destination.stride()
    made = torch.empty_strided(shape, stride, dtype=destination.dtype, device=source.device)
    return made.copy_(source)


def _forget_last_error() -> None:
    """Clear CUDA's last error, which the next kernel launch would report.

    Torch has no binding of ``cudaGetLastError``, so it is called in the loaded libraries.
    """
    paths = {line.split(maxsplit=5)[5] for line in _maps() if "libcudart" in line}
    for path in paths:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(path.removesuffix(" (deleted)")).cudaGetLastError()
