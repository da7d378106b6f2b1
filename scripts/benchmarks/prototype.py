"""The same path as ours with nothing around it: the bound that our own loop is held against.

Parameters in shared memory, read in place; gradients copied to the worker's row as backward makes
them; flags in shared memory to meet at; each worker merges and updates every other chunk of the
flat buffers with the fused Adam kernel. No Lightning, no server, no messages, no look at whether
the others live, at what the user has changed, or at whether a gradient is finite.

Legend: P elements of the flat buffer, W workers.
"""

from __future__ import annotations

import os
import time
from multiprocessing import Process, get_context

import torch

from benchmarks.loops import note, noted, warm_up
from benchmarks.models import MODELS
from hybridtrain.memory import Arena, Layout, Store
from hybridtrain.update.merge import merge
from hybridtrain.worlds.child import die_with_parent, keep_freed_memory

_CHUNK = 1 << 16
_F32 = torch.float32


def prototype(model: str, workers: int, seconds: float) -> float:
    """Seconds of a step."""
    torch.manual_seed(0)
    net = MODELS[model].make()
    store = Store(Layout.of(net.named_parameters()), workers, private_parameters=False)
    parent, flags = os.getpid(), Arena.create(64 * workers)
    moments = [_shared(store) for _ in range(2)]
    context = get_context("fork")
    processes: list[Process] = [
        context.Process(target=_work, args=(w, parent, model, seconds, net, store, flags, moments))  # type: ignore[misc]
        for w in range(workers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return noted()


def _shared(store: Store) -> torch.Tensor:
    """Zeros in shared memory, (P,)."""
    size = store.masters[_F32].numel()
    return Arena.create(4 * size).tensor(0, size, _F32)


def _work(
    worker: int,
    parent: int,
    model: str,
    seconds: float,
    net: torch.nn.Module,
    store: Store,
    flags: Arena,
    moments: list[torch.Tensor],
) -> None:
    die_with_parent(parent)
    keep_freed_memory()
    torch.set_flush_denormal(True)
    spec = MODELS[model]
    _move_in(net, store, worker)
    count = flags.tensor(0, 16 * store.n_workers, torch.int32)[::16]  # (W,), a cache line each
    meeting = _Meeting(count.numpy(), worker)
    meeting.meet()
    steps = spec.steps(seconds)
    first = warm_up(steps)
    x, y = spec.samples(8 * spec.batch_size)
    began = 0.0
    for step in range(steps):
        if step == first:
            began = time.perf_counter()
        part = slice((step % 8) * spec.batch_size, (step % 8 + 1) * spec.batch_size)
        net(x[part], y[part]).backward()
        for parameter in net.parameters():
            parameter.grad = None
        meeting.meet()
        _update(store, moments, worker, torch.tensor(float(step + 1)))
        meeting.meet()
    if worker == 0:
        note((time.perf_counter() - began) / (steps - first))


@torch.no_grad()
def _move_in(net: torch.nn.Module, store: Store, worker: int) -> None:
    """Parameters become views of the masters; gradients go to the worker's row."""
    for parameter, slot in zip(net.parameters(), store.layout.slots, strict=True):
        view = store.master(slot)
        if worker == 0:
            view.copy_(parameter)
        parameter.data = view
        row = store.gradient(worker, slot)
        parameter.register_post_accumulate_grad_hook(_copier(row))


def _copier(row: torch.Tensor):  # type: ignore[no-untyped-def]
    def copy(parameter: torch.Tensor) -> None:
        row.copy_(parameter.grad)  # type: ignore[arg-type]

    return copy


class _Meeting:
    """All wait for all: everybody counts up and looks at the others, giving way meanwhile."""

    def __init__(self, counts, worker: int) -> None:  # type: ignore[no-untyped-def]
        self._counts, self._worker, self._turn = counts, worker, 0

    def meet(self) -> None:
        self._turn += 1
        self._counts[self._worker] = self._turn
        while self._counts.min() < self._turn:
            os.sched_yield()


@torch.no_grad()
def _update(store: Store, moments: list[torch.Tensor], worker: int, step: torch.Tensor) -> None:
    """This worker's chunks: the mean of the rows, and Adam."""
    workers = store.n_workers
    masters, rows = store.masters[_F32], [row[_F32] for row in store.gradients]
    scratch, share = torch.empty(_CHUNK), 1.0 / workers
    size = masters.numel()
    chunk = min(_CHUNK, -(-size // workers // 16) * 16)
    for start in range(worker * chunk, size, workers * chunk):
        part = slice(start, min(start + chunk, size))
        own = [row[part] for row in rows]
        gradient = merge(own, [share] * workers, scratch[: len(own[0])])
        torch._fused_adam_(
            *([masters[part]], [gradient], [moments[0][part]], [moments[1][part]], [], [step]),
            amsgrad=False,
            lr=1e-4,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=1e-8,
            maximize=False,
        )
