"""What there is to hide on a GPU's machine, and behind what: each measured alone."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from benchmarks.exchange import room_for
from benchmarks.gpu_models import Language, words
from hybridtrain.memory import Layout, Store
from hybridtrain.updates import Contribution, build_update
from hybridtrain.updates.thread_pool import Pool


def costs(model: dict[str, int], samples: int, device: str = "cuda") -> dict[str, Any]:
    """Seconds of each, alone: see :class:`benchmarks.crossover.Costs`."""
    net = Language(**model).to(device)
    n = sum(p.numel() for p in net.parameters())
    times = [_passes(net, model, size, device) for size in (samples // 2, samples)]
    del net
    out_s, back_s = _bus(device)
    return {
        "out_s": 4 * n * out_s,
        "back_s": 4 * n * back_s,
        "update_s": _update(n),
        "forward": [(size, forward) for size, forward, _ in times],
        "backward": [(size, backward) for size, _, backward in times],
    }


def _passes(
    net: nn.Module, model: dict[str, int], samples: int, device: str
) -> tuple[int, float, float]:
    x, y = (each.to(device) for each in words(model, samples))
    seconds = []
    for _ in range(4):
        net.zero_grad()
        with _clock(device, seconds), torch.autocast(device, torch.bfloat16):
            loss = net(x, y)
        with _clock(device, seconds):
            loss.backward()
    return samples, min(seconds[2::2]), min(seconds[3::2])


@contextmanager
def _clock(device: str, seconds: list[float]) -> Iterator[None]:
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    yield
    if device == "cuda":
        torch.cuda.synchronize()
    seconds.append(time.perf_counter() - began)


def _bus(device: str, n_bytes: int = 2**28) -> tuple[float, float]:
    """Seconds of a byte to the host and back, page-locked."""
    here = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=device == "cuda")
    there = torch.empty(n_bytes, dtype=torch.uint8, device=device)
    ways: list[float] = []
    for to, of in ((here, there), (there, here)):
        seconds: list[float] = []
        for _ in range(4):
            with _clock(device, seconds):
                to.copy_(of, non_blocking=True)
        ways.append(min(seconds) / n_bytes)
    return ways[0], ways[1]


def _update(n: int) -> float:
    """Seconds of one step of n parameters in host memory, on all cores."""
    room_for(4 * n * 5)
    store = Store(Layout.of([("w", torch.empty(n, device="meta"))]), 1, private_parameters=False)
    weight = torch.nn.Parameter(store.master(store.layout.slots[0]))
    pool = Pool(len(os.sched_getaffinity(0)))
    update = build_update(torch.optim.AdamW([weight], lr=1e-4), [0], store, pool)
    store.gradients[0][torch.float32].fill_(1e-3)
    seconds: list[float] = []
    with torch.no_grad():
        for _ in range(4):
            with _clock("cpu", seconds):
                update.step([Contribution(0, 1.0)], None)
    pool.close()
    return min(seconds[1:])
