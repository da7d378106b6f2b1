"""The arithmetic of optimizers that take sparse gradients, for touched rows alone.

Each class follows torch's own (``torch.optim._functional.sparse_adam``, ``_single_tensor_adagrad``,
``_single_tensor_sgd``), operation by operation, on rows that were copied to where they are hot; so
the bits are torch's, too.

Legend: n rows of shape (...).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hybridtrain.memory import Rows, Table
from hybridtrain.memory.table import Block

Group = Mapping[str, Any]  # hyper-parameters
State = dict[str, Any]  # what torch's optimizer keeps for a parameter
Tables = Sequence[Table]  # of the parameter, and of what is kept for it
# rows (n,), gradient (n, ...) that may be changed, tables, scratch: n rows or more each
StepRows = Callable[[Rows, torch.Tensor, Tables, Sequence[Block]], None]


class RowKernel(ABC):
    """One kind of optimizer; without state of its own."""

    names: tuple[str, ...] = ()  # what it keeps for each element
    scratch = 1  # temporaries

    def begin(self, group: Group, state: State, make: Callable[[], torch.Tensor]) -> None:
        """There is a first gradient: fill what is kept, as torch does, with zeros from ``make``."""
        state |= {name: make() for name in self.names}

    @abstractmethod
    def prepare(self, group: Group, state: State) -> StepRows:
        """Count one step, in ``state``; returns what steps some of its rows."""


class RowSgd(RowKernel):
    """SGD without momentum."""

    def prepare(self, group: Group, state: State) -> StepRows:
        rate = _directed(group, -float(group["lr"]))

        def step(rows: Rows, g: torch.Tensor, tables: Tables, out: Sequence[Block]) -> None:
            tables[0].take(rows, out[0]).add_(g, alpha=rate)
            tables[0].put(rows, out[0])

        return step


class RowAdagrad(RowKernel):
    """Adagrad. Its state is filled when it is made, so it is there already."""

    names = ("sum",)
    scratch = 2

    def prepare(self, group: Group, state: State) -> StepRows:
        state["step"] += 1
        rate = _number(group["lr"]) / (1 + (float(state["step"]) - 1) * group["lr_decay"])
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
    """SparseAdam: moments of touched rows move, corrected by the number of all steps."""

    names = ("exp_avg", "exp_avg_sq")
    scratch = 3

    def begin(self, group: Group, state: State, make: Callable[[], torch.Tensor]) -> None:
        state["step"] = 0
        super().begin(group, state, make)

    def prepare(self, group: Group, state: State) -> StepRows:
        state["step"] += 1
        count, (beta1, beta2), eps = state["step"], group["betas"], group["eps"]
        size = _number(group["lr"]) * math.sqrt(1 - beta2**count) / (1 - beta1**count)
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
    """Of a plain torch optimizer that takes sparse gradients, and is none of its subclasses."""
    kind = type(optimizer)
    if kind is torch.optim.SparseAdam:
        return RowSparseAdam()
    if kind is torch.optim.Adagrad:
        return RowAdagrad()
    return RowSgd() if kind is torch.optim.SGD else None


def _number(value: Any) -> Any:
    """A figure; one that is a tensor stays one, so that it rounds as it does in torch."""
    return value.squeeze() if isinstance(value, torch.Tensor) else value


def _directed(group: Group, rate: float) -> float:
    return -rate if group.get("maximize") else rate
