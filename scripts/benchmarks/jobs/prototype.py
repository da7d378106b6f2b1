"""The same path as ours with nothing around it: the bound that our own loop is held against.

Parameters in shared memory, read in place; gradients copied to the worker's row as backward makes
them; flags in shared memory to meet at; each worker merges and updates every other chunk of the
flat buffers with the fused Adam kernel. No server, no messages, no look at whether the others live,
at what the user has changed, or at whether a gradient is finite. ``prototype`` trains in a bare
loop, ``in_lightning`` in Lightning's, which knows nothing of the other workers.

Legend: P elements of the flat buffer, W workers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from pytorch_lightning.strategies import SingleDeviceStrategy

from benchmarks.jobs.loops import Timer, loop, note, noted, trainer, warm_up
from benchmarks.jobs.models import MODELS, Trained, loader
from hybridtrain.engine.memory import Arena, Layout, Store
from hybridtrain.engine.updates.mean import merge
from hybridtrain.engine.worlds.parent_death import die_with_parent
from hybridtrain.engine.worlds.worker_main import keep_freed_memory

_CHUNK = 1 << 16
_F32 = torch.float32


@dataclass
class Path:
    """One worker's side: what it shares with the others, and its step.

    ``counts``: (W,) int32, shared, a cache line each. ``moments``: two of (P,), shared.
    """

    store: Store
    moments: list[torch.Tensor]
    counts: np.ndarray[Any, Any]
    worker: int = 0
    parameters: list[torch.nn.Parameter] = field(default_factory=list)
    _turn: int = 0
    _steps: int = 0
    _scratch: torch.Tensor = field(default_factory=lambda: torch.empty(_CHUNK))

    @classmethod
    def of(cls, net: torch.nn.Module, workers: int) -> Path:
        """Make what is shared, before the workers are forked."""
        store = Store(Layout.of(net.named_parameters()), workers, private_parameters=False)
        size = store.masters[_F32].numel()
        moments = [Arena.create(4 * size).tensor(0, size, _F32) for _ in range(2)]
        counts = Arena.create(64 * workers).tensor(0, 16 * workers, torch.int32)[::16]
        return cls(store, moments, counts.numpy())

    @torch.no_grad()
    def move_in(self, net: torch.nn.Module, worker: int) -> None:
        """Parameters become views of the masters; gradients go to the worker's row."""
        self.worker, self.parameters = worker, list(net.parameters())
        for parameter, slot in zip(self.parameters, self.store.layout.slots, strict=True):
            view = self.store.master(slot)
            if worker == 0:
                view.copy_(parameter)
            parameter.data = view
            parameter.register_post_accumulate_grad_hook(_copier(self.store.gradient(worker, slot)))
        self.meet()

    def meet(self) -> None:
        """All wait for all: everybody counts up and looks at the others, giving way meanwhile."""
        self._turn += 1
        self.counts[self.worker] = self._turn
        while self.counts.min() < self._turn:
            os.sched_yield()

    def zero_grad(self) -> None:
        """As an optimizer does."""
        for parameter in self.parameters:
            parameter.grad = None

    def step(self) -> None:
        """Once the row is full."""
        self._steps += 1
        self.meet()
        self._update(torch.tensor(float(self._steps)))
        self.meet()

    @torch.no_grad()
    def _update(self, step: torch.Tensor) -> None:
        """This worker's chunks: the mean of the rows, and Adam."""
        workers, masters = self.store.n_workers, self.store.masters[_F32]
        rows, shares = [row[_F32] for row in self.store.gradients], [1.0 / workers] * workers
        size = masters.numel()
        chunk = min(_CHUNK, -(-size // workers // 16) * 16)
        for start in range(self.worker * chunk, size, workers * chunk):
            part = slice(start, min(start + chunk, size))
            scratch = self._scratch[: part.stop - part.start]
            gradient = merge([row[part] for row in rows], shares, scratch)
            moments = [[moment[part]] for moment in self.moments]
            torch._fused_adam_(
                *([masters[part]], [gradient], *moments, [], [step]),
                amsgrad=False,
                lr=1e-4,
                beta1=0.9,
                beta2=0.999,
                eps=1e-8,
                weight_decay=0.0,
                maximize=False,
            )


def _copier(row: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def copy(parameter: torch.Tensor) -> None:
        row.copy_(parameter.grad)  # type: ignore[arg-type]

    return copy


# ---- jobs ---------------------------------------------------------------------------------------


def prototype(model: str, workers: int, seconds: float) -> float:
    """Seconds of a step in a bare loop."""
    return _forked(_bare, model, workers, seconds)


def in_lightning(model: str, workers: int, seconds: float) -> float:
    """Seconds of a step in Lightning's loop."""
    return _forked(_lightning, model, workers, seconds)


def _forked(body: Callable[..., None], model: str, workers: int, seconds: float) -> float:
    module, parent = Trained(model, None), os.getpid()
    path = Path.of(module, workers)
    context = get_context("fork")
    processes = [
        context.Process(target=_worker, args=(parent, body, path, w, module, model, seconds))
        for w in range(workers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return noted()


def _worker(parent: int, body: Callable[..., None], path: Path, worker: int, *rest: Any) -> None:
    die_with_parent(parent)
    keep_freed_memory()
    torch.set_flush_denormal(True)
    path.worker = worker
    body(path, *rest)


def _bare(path: Path, module: Trained, model: str, seconds: float) -> None:
    path.move_in(module, path.worker)
    step_s = loop(module.net, path, model, seconds)
    if path.worker == 0:
        note(step_s)


class _Bare(SingleDeviceStrategy):
    """Lightning believes that it trains alone."""

    def __init__(self, path: Path) -> None:
        super().__init__("cpu")
        self.path = path

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **_: Any) -> Any:
        output = closure()
        self.path.step()
        return output


def _lightning(path: Path, module: Trained, model: str, seconds: float) -> None:
    path.move_in(module, path.worker)
    steps = MODELS[model].steps(seconds)
    timer = Timer(warm_up(steps), tells=path.worker == 0)
    trainer(_Bare(path), 1, timer).fit(module, loader(model, steps, 1))
