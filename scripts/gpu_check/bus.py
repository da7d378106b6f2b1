"""The bus, as the strategy uses it: shared memory, page-locked, copied both ways."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from gpu_check.check import Found


def probe(n_bytes: int = 2**30, kind: str = "cuda") -> Found:
    """GB/s with and without page-locking, how long the call blocks, and what small copies cost."""
    import torch

    from hybridtrain.engine.memory.arena import Arena
    from hybridtrain.engine.worker.device.cuda import CudaStreams

    device = torch.device(kind, 0)
    module = torch.get_device_module(device)
    streams = CudaStreams(device)
    host = Arena.create(n_bytes).tensor(0, n_bytes, torch.uint8)
    host.fill_(1)
    there = torch.empty(n_bytes, dtype=torch.uint8, device=device)
    figures: dict[str, Any] = {"pageable": _both_ways(module, host, there)}
    began = time.perf_counter()
    refused = streams.lock(host)
    figures |= {"lock_s": time.perf_counter() - began, "refused": refused}
    if refused:
        return Found(f"{n_bytes >> 20} MiB could not be page-locked: {refused}", False, figures)
    figures["locked"] = _both_ways(module, host, there)
    for size in (2**16, 2**20):
        small = _timed(module, lambda s=size: there[:s].copy_(host[:s], non_blocking=True), 200)
        figures[f"copy_{size >> 10}_KiB_us"] = 1e6 * small[1] / 200
    streams.unlock(host)
    locked = figures["locked"]
    text = (
        f"page-locked {locked['up_GB_s']:.1f} GB/s up, {locked['down_GB_s']:.1f} down, the call "
        f"returns in {locked['up_blocks_ms']:.2f} ms; pageable {figures['pageable']['up_GB_s']:.1f}"
        f" and {figures['pageable']['down_GB_s']:.1f}, blocks "
        f"{figures['pageable']['up_blocks_ms']:.0f} ms; locking took {figures['lock_s']:.2f} s"
    )
    return Found(text, True, figures)


def _both_ways(module: Any, host: Any, there: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    for way, to, of in (("up", there, host), ("down", host, there)):
        to.copy_(of, non_blocking=True)  # the first one is slower
        blocks, whole = _timed(module, lambda to=to, of=of: to.copy_(of, non_blocking=True))
        found |= {f"{way}_GB_s": host.nbytes / whole / 1e9, f"{way}_blocks_ms": 1e3 * blocks}
    return found


def _timed(module: Any, work: Callable[[], Any], times: int = 1) -> tuple[float, float]:
    """Seconds until the calls are back, and until the device has done all."""
    module.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        work()
    back = time.perf_counter() - began
    module.synchronize()
    return back, time.perf_counter() - began
