"""Kernels of torch's sparse optimizers, for the rows that have a gradient.

Each class follows torch's function (``torch.optim._functional.sparse_adam``,
``_single_tensor_adagrad``, ``_single_tensor_sgd``) operation by operation, with torch's bits.

Legend: n rows of shape (...).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hybridtrain.engine.memory import Rows, Table
from hybridtrain.engine.memory.sparse_rows import Block
from hybridtrain.engine.updates.kernels.kernel import number

Group = Mapping[str, Any]  # hyper-parameters
State = dict[str, Any]  # of a parameter in torch's optimizer
Tables = Sequence[Table]  # of the parameter, and of its state
# rows (n,), gradient (n, ...) that may be changed, tables, scratch: n rows or more each
StepRows = Callable[[Rows, torch.Tensor, Tables, Sequence[Block]], None]


class RowKernel(ABC):
    """Steps rows of one optimizer class; itself stateless."""

    names: tuple[str, ...] = ()  # of the state tensors

    def begin(self, group: Group, state: State, make: Callable[[], torch.Tensor]) -> None:
        """Initialise the state as torch does, with zeros from ``make``."""
        state |= {name: make() for name in self.names}

    @abstractmethod
    def prepare(self, group: Group, state: State) -> StepRows:
        """Count one step in ``state``; returns the function that steps some of its rows."""


class RowSgd(RowKernel):
    """SGD without momentum."""

    def prepare(self, group: Group, state: State) -> StepRows:
        rate = _directed(group, -float(group["lr"]))

        def step(rows: Rows, g: torch.Tensor, tables: Tables, out: Sequence[Block]) -> None:
            tables[0].take(rows, out[0]).add_(g, alpha=rate)
            tables[0].put(rows, out[0])

        return step


class RowAdagrad(RowKernel):
    """Adagrad, whose state torch initialises in its constructor."""

    names = ("sum",)

    def prepare(self, group: Group, state: State) -> StepRows:
        state["step"] += 1
        rate = number(group["lr"]) / (1 + (float(state["step"]) - 1) * group["lr_decay"])
        rate, eps = _directed(group, -float(rate)), group["eps"]

        def step(rows: Rows, g: torch.Tensor, tables: Tables, out: Sequence[Block]) -> None:
            parameter, total = tables
            sums = total.take(rows, out[0])
            sums.add_(torch.mul(g, g, out=out[1].tensor[: len(rows)]))
            total.put(rows, out[0])
            g.div_(sums.sqrt_().add_(eps))
            parameter.take(rows, out[1]).add_(g, alpha=rate)
            parameter.put(rows, out[1])

        return step


class RowSparseAdam(RowKernel):
    """SparseAdam: moments of rows, bias-corrected by the number of all steps."""

    names = ("exp_avg", "exp_avg_sq")

    def begin(self, group: Group, state: State, make: Callable[[], torch.Tensor]) -> None:
        state["step"] = 0
        super().begin(group, state, make)

    def prepare(self, group: Group, state: State) -> StepRows:
        state["step"] += 1
        count, (beta1, beta2), eps = state["step"], group["betas"], group["eps"]
        size = number(group["lr"]) * math.sqrt(1 - beta2**count) / (1 - beta1**count)
        backwards = group.get("maximize", False)

        def step(rows: Rows, g: torch.Tensor, tables: Tables, out: Sequence[Block]) -> None:
            parameter, mean, square = tables
            change = out[2].tensor[: len(rows)]
            if backwards:
                g.neg_()
            upper = mean.take(rows, out[0])
            upper.add_(torch.sub(g, upper, out=change).mul_(1 - beta1))
            mean.put(rows, out[0])
            lower = square.take(rows, out[1])
            lower.add_(torch.mul(g, g, out=change).sub_(lower).mul_(1 - beta2))
            square.put(rows, out[1])
            upper.div_(lower.sqrt_().add_(eps)).mul_(-float(size))
            parameter.take(rows, out[2]).add_(upper)
            parameter.put(rows, out[2])

        return step


def row_kernel(optimizer: torch.optim.Optimizer) -> RowKernel | None:
    """The kernel of a torch optimizer that accepts sparse gradients; subclasses have none."""
    kind = type(optimizer)
    if kind is torch.optim.SparseAdam:
        return RowSparseAdam()
    if kind is torch.optim.Adagrad:
        return RowAdagrad()
    return RowSgd() if kind is torch.optim.SGD else None


def _directed(group: Group, rate: float) -> float:
    return -rate if group.get("maximize") else rate
