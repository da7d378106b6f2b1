"""One exchange and update, without a network to train: what grows with parameters and workers.

``hybrid``: worker processes whose gradients lie in their rows push them to the server and wait for
the release, as they do in training. ``gloo``: each process has a flat gradient, all-reduces it,
divides, and steps its own copy of the parameters with fused Adam; one flat tensor, so neither
buckets nor a Python loop over parameters count. Jobs return seconds of an exchange.

Legend: P parameters, W workers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.jobs.loops import group, note, noted
from hybridtrain.engine.memory import Layout, Store
from hybridtrain.engine.memory.limits import available_bytes
from hybridtrain.engine.policies import make_policy
from hybridtrain.engine.protocol.messages import GradientPush, Install, Share
from hybridtrain.engine.server.server import ParameterServer
from hybridtrain.engine.updates.serialize import dump
from hybridtrain.engine.worker.client import Client
from hybridtrain.engine.worlds.process_world import ProcessWorld
from hybridtrain.errors import UserError

_FEWEST, _MOST = 3, 400
_SHARE = 0.8  # of the memory that is free: more is not asked for


def room_for(n_bytes: int) -> None:
    """Ask before the out-of-memory killer answers.

    Raises:
        UserError: if so much is not there.
    """
    available = available_bytes()
    if available is not None and n_bytes > _SHARE * available:
        raise UserError(
            f"it needs {n_bytes / 2**30:.1f} GiB of memory, and {available / 2**30:.1f} are free"
        )


def hybrid(parameters: int, workers: int, seconds: float) -> float:
    """Ours: masters, two moments, and a row for each worker."""
    room_for(4 * parameters * (3 + workers))
    server = ParameterServer(make_policy("hybrid"), workers, len(os.sched_getaffinity(0)))
    world = ProcessWorld(server, workers)
    return float(world.run(partial(_push, parameters, seconds))[0])


def _push(parameters: int, seconds: float, client: Client) -> float:
    layout = Layout.of([("w", torch.empty(parameters, device="meta"))])
    store = Store(layout, client.n_workers, False, client.memory.map(Share(layout)))
    (slot,) = layout.slots
    store.gradient(client.worker, slot).normal_()
    client.gather("rows", None)
    weight = torch.nn.Parameter(store.master(slot))
    optimizer = torch.optim.Adam([weight], lr=1e-4)
    client.install(Install((dump(optimizer, {id(weight): 0}),) if client.worker == 0 else ()))
    return _timed(lambda: client.push(GradientPush(0, 1.0)), parameters, client.n_workers, seconds)


def _timed(step: Callable[[], object], parameters: int, workers: int, seconds: float) -> float:
    """Steps that fill the time, the same number everywhere: after some that do not count."""
    guess_s = 2e-4 * workers + 3e-9 * parameters * (1 + workers)
    steps = min(_MOST, max(_FEWEST, round(seconds / guess_s)))
    for _ in range(max(2, steps // 5)):
        step()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - began) / steps


def gloo(parameters: int, workers: int, seconds: float) -> float:
    """All-reduce and fused Adam: parameters, gradient and two moments in each process."""
    room_for(4 * parameters * (4 + 1) * workers)  # and what gloo receives into
    arguments = (parameters, workers, seconds, str(Path.cwd()))
    mp.start_processes(_reduce, arguments, nprocs=workers, start_method="fork")  # type: ignore[no-untyped-call]
    return noted()


def _reduce(rank: int, parameters: int, workers: int, seconds: float, folder: str) -> None:
    with group(rank, workers, folder):
        taken = _timed(_allreduced(parameters, workers), parameters, workers, seconds)
        if rank == 0:
            note(taken)


def _allreduced(parameters: int, workers: int) -> Callable[[], object]:
    weight = torch.nn.Parameter(torch.zeros(parameters))
    weight.grad = torch.randn(parameters)
    optimizer = torch.optim.Adam([weight], lr=1e-4, fused=True)

    def step() -> None:
        dist.all_reduce(weight.grad)
        weight.grad.div_(workers)  # type: ignore[union-attr]
        optimizer.step()

    return step
