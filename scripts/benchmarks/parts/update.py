"""The update alone: the mean of the workers' rows, and Adam on the masters.

Rows that are full, no network, no messages: what is left is arithmetic and memory. Ours uses all
cores, as it does while workers wait. Against it, each for two workers: gloo's all-reduce with fused
Adam in two processes, a core each; one fused pass in numba, as fast as C, on all cores; what the
machine's memory gives (the share of its bandwidth); DeepSpeed's CPUAdam on the mean that torch has
made, on all cores.

Legend: P parameters, W workers.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.frame import Frame
from benchmarks.jobs.exchange import room_for
from benchmarks.jobs.peers import Peer, deepspeed_adam, numba_pass
from benchmarks.parts.bandwidth import bandwidth
from benchmarks.rows import NOTHING_ASKED, Goal, Row, Skipped
from benchmarks.runs import Job
from hybridtrain.engine.memory import Layout, Store
from hybridtrain.engine.updates.base import Contribution, StepInput
from hybridtrain.engine.updates.factory import build_update
from hybridtrain.engine.updates.thread_pool import Pool

W = 2
GOALS = {"1e5": Goal(20, 40), "1e6": Goal(12, 25), "1e7": Goal(7, 12), "1e8": Goal(7, 8)}
_BYTES = 4 * (W + 6)  # rows, and three tensors that are read and written, for each parameter
_NUMBA = Goal(1.3, 1.05, of="time")
_SHARE = Goal(0.6, 0.9)


def rows(frame: Frame) -> Iterator[Row | Skipped]:
    """Measure the update of every size, against all alternatives."""
    quick = frame.options.quick
    for name in list(GOALS)[: 1 if quick else None]:
        size, work = int(float(name)), f"{name} parameters, {W} workers"
        gloo = _job("gloo all-reduce, fused Adam", "jobs.exchange:gloo", size, workers=W)
        against = [(gloo, GOALS[name])]
        if not quick:
            against.append(
                (_job("one pass in numba", "parts.update:peer", size, name="numba"), _NUMBA)
            )
        if size == 10**7 and not quick:
            label = "torch mean, DeepSpeedCPUAdam"
            peer = _job(label, "parts.update:peer", size, name="deepspeed")
            against.append((peer, NOTHING_ASKED))
        once = 1 if size > 10**7 else None
        ours = _job("mean + Adam", "parts.update:ours", size)
        yield from frame.alternate(work, ours, against, "ms", repeats=once)
        if size == 10**7 and not quick:
            job = _job("mean + Adam", "parts.update:of_the_bus", size)
            yield from frame.together(work, job, "the memory's limit", _SHARE, note="share of it")


def _job(label: str, function: str, parameters: int, **more: object) -> Job:
    arguments = {"parameters": parameters, "seconds": 0.4} | more
    return Job(label, f"benchmarks.{function}", arguments)


# ---- jobs ---------------------------------------------------------------------------------------


def ours(parameters: int, seconds: float) -> float:
    """Seconds of an update."""
    return statistics.median(_alternately([_ours(parameters)], seconds)[0])


def _ours(parameters: int) -> Callable[[], object]:
    room_for(4 * parameters * (3 + W))
    torch.manual_seed(0)
    layout = Layout.of([("w", torch.empty(parameters, device="meta"))])
    store = Store(layout, W, private_parameters=False)
    weight = torch.nn.Parameter(store.master(layout.slots[0]))
    for row in store.gradients:
        row[torch.float32].normal_()
    pool = Pool(len(os.sched_getaffinity(0)))
    update = build_update(torch.optim.Adam([weight], lr=1e-4), [0], store, pool)
    contributions = [Contribution(worker, 1 / W) for worker in range(W)]

    def step() -> None:
        with torch.no_grad():
            update.step(StepInput(contributions))

    return step


def _alternately(steps: list[Callable[[], object]], seconds: float) -> list[list[float]]:
    """Seconds of a call of each, in blocks by turns; of each block the mean."""
    for step in steps:
        step()
    began = time.perf_counter()
    for step in steps:
        step()
    calls = max(1, int(seconds / 5 / (time.perf_counter() - began)))
    found: list[list[float]] = [[] for _ in steps]
    for turn in range(6):
        for number in range(len(steps))[:: 1 if turn % 2 == 0 else -1]:
            began = time.perf_counter()
            for _ in range(calls):
                steps[number]()
            found[number].append((time.perf_counter() - began) / calls)
    return [blocks[1:] for blocks in found]  # the first was the warm-up


_PEERS: dict[str, Peer] = {"numba": numba_pass, "deepspeed": deepspeed_adam}


def peer(parameters: int, seconds: float, name: str) -> float:
    """Seconds of what another library makes of it. In a process of its own: their threads spin."""
    return statistics.median(_alternately([_PEERS[name](parameters, W)], seconds)[0])


def of_the_bus(parameters: int, seconds: float) -> dict[str, list[float]]:
    """Ours, and how long its bytes would take at the speed at which memory is changed in place."""
    cores = len(os.sched_getaffinity(0))
    (mine,) = _alternately([_ours(parameters)], seconds)
    limit = bandwidth("in place", 1 << 25, cores) * 1e9
    return {"ours": mine, "baseline": [_BYTES * parameters / limit] * len(mine)}
