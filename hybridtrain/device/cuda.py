"""The real device: CUDA streams and events, and page-locked host memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from hybridtrain.device.streams import Lane


class CudaStreams:
    """One GPU, as one worker uses it; or a device whose module in torch is like ``torch.cuda``.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = torch.get_device_module(device)  # torch.cuda, or what another kind has for it
        self._side = {lane: self._cuda.Stream(device) for lane in Lane if lane is not Lane.COMPUTE}

    def _stream(self, lane: Lane) -> Any:
        if lane is Lane.COMPUTE:
            return self._cuda.current_stream(self._device)
        return self._side[lane]

    def record(self, lane: Lane) -> Any:
        event = self._cuda.Event(blocking=True)  # the host's cores have an update to make
        event.record(self._stream(lane))
        return event

    def wait(self, lane: Lane, mark: Any) -> None:
        self._stream(lane).wait_event(mark)

    def synchronise(self, mark: Any) -> None:
        mark.synchronize()

    def reached(self, mark: Any) -> bool:
        return bool(mark.query())

    @torch.no_grad()
    def copy(self, lane: Lane, destination: torch.Tensor, source: torch.Tensor) -> None:
        if not destination.numel():
            return
        stream = self._stream(lane)
        with self._cuda.stream(stream):
            destination.copy_(_like(destination, source), non_blocking=True)
        for tensor in (source, destination):
            if tensor.device.type != "cpu":
                tensor.record_stream(stream)

    def do(self, lane: Lane, work: Callable[[], None]) -> None:
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


def _like(destination: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The source with the destination's dtype and stride, converted on the device.

    Torch would convert in host memory, and make the host wait for it.
    """
    same = source.dtype == destination.dtype and source.stride() == destination.stride()
    if same or source.device.type == "cpu":
        return source
    shape, stride = destination.shape, destination.stride()
    made = torch.empty_strided(shape, stride, dtype=destination.dtype, device=source.device)
    return made.copy_(source)


def _forget_last_error() -> None:
    """CUDA remembers the failure, and the next kernel launch would be blamed for it.

    Torch's binding has no ``cudaGetLastError``, so the libraries that are loaded are asked.
    """
    with suppress(OSError):
        maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        paths = {line.split(maxsplit=5)[5] for line in maps if "libcudart" in line}
        for path in paths:
            with suppress(OSError, AttributeError):
                ctypes.CDLL(path.removesuffix(" (deleted)")).cudaGetLastError()
