"""Compiled steps: a module without optimizer that steps the rows of an embedding itself.

The same loss as :class:`benchmarks.jobs.models.Bag`, and SparseAdam's arithmetic on the rows of a
sample, one sample after the other, in a function that numba compiles. Moments are parameters, so
that all workers share them. ``docs/compiled_steps.md`` says how such a module is written.
"""

from __future__ import annotations

from typing import Any

import numba
import pytorch_lightning as pl
import torch
from torch import Tensor

from benchmarks.jobs.loops import Timer, noted, trainer, warm_up
from benchmarks.jobs.models import MODELS, loader
from hybridtrain import HybridStrategy

_RATE, _BETA, _BETA2, _EPS = 1e-3, 0.9, 0.999, 1e-8


@numba.njit(nogil=True, fastmath=True, error_model="numpy")
def step(table: Any, first: Any, second: Any, x: Any, y: Any, number: int) -> float:
    """Adam on the rows of ids x (B, n), with labels y (B,); returns the mean loss before."""
    n, width = x.shape[1], table.shape[1]
    rate = _RATE * (1 - _BETA2**number) ** 0.5 / (1 - _BETA**number)
    kind = table.dtype.type
    moved, loss = kind(rate), 0.0
    share, beta, beta2, eps = kind(2 / (x.size * width)), kind(_BETA), kind(_BETA2), kind(_EPS)
    gradient = table[0].copy()
    for sample in range(len(x)):
        gradient[:] = 0
        for j in range(n):
            row = table[x[sample, j]]
            for k in range(width):
                gradient[k] += row[k]
        for k in range(width):
            gap = gradient[k] / kind(n) - kind(y[sample])
            loss += gap * gap
            gradient[k] = share * gap
        for j in range(n):
            at = x[sample, j]
            row, m, v = table[at], first[at], second[at]
            for k in range(width):
                m[k] += (kind(1) - beta) * (gradient[k] - m[k])
                v[k] += (kind(1) - beta2) * (gradient[k] * gradient[k] - v[k])
                row[k] -= moved * m[k] / (v[k] ** kind(0.5) + eps)
    return loss / (len(x) * width)


class Written(pl.LightningModule):
    """The embedding with compiled steps; it knows a step's number by its own."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.table = next(MODELS[model].make().parameters())
        self.first = torch.nn.Parameter(torch.zeros_like(self.table))
        self.second = torch.nn.Parameter(torch.zeros_like(self.table))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        tensors = (self.table.detach(), self.first.detach(), self.second.detach(), *batch)
        table, first, second, x, y = (each.numpy() for each in tensors)
        step(table, first, second, x, y, batch_idx * self.trainer.world_size + 1)

    def configure_optimizers(self) -> None:
        """None: the step writes."""


def written(model: str, workers: int, seconds: float) -> float:
    """Under ``hogwild``; seconds of a step of one worker."""
    steps = MODELS[model].steps(seconds)
    strategy = HybridStrategy("hogwild", threads_per_worker=1)
    fitting = trainer(strategy, workers, Timer(warm_up(steps)))
    fitting.fit(Written(model), loader(model, steps, workers))
    return noted()
