"""The contract between the flat pass and the arithmetic of one kind of optimizer.

An optimizer is *elementwise* if what it makes of an element depends on that element's gradient,
value and state alone, and on figures that are the same for all elements of a parameter (the number
of steps). Then its parameters may be cut anywhere and joined with their neighbours. A kernel says
what such an optimizer keeps, and steps one chunk.

Legend: n elements of a chunk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

Group = dict[str, Any]  # hyper-parameters
Figures = dict[str, torch.Tensor]  # () each: what torch keeps per parameter, e.g. "step"
Tensors = Sequence[torch.Tensor]  # (n,) each
# parameter (n,), gradient (n,) that must not be changed, state, scratch
StepChunk = Callable[[torch.Tensor, torch.Tensor, Tensors, Tensors], None]


class Kept(ABC):
    """What one kind of optimizer keeps."""

    figures: tuple[str, ...] = ("step",)

    @abstractmethod
    def names(self, group: Group) -> tuple[str, ...]:
        """The flat tensors that it keeps, under torch's names, in the order of ``state``."""

    def start(self, group: Group) -> dict[str, float]:
        """What figures and flat tensors hold before the first step, unless it is zero."""
        return {}

    def keeps(self, group: Group) -> bool:
        """Whether there is a state once a step has been made."""
        return True


class Kernel(Kept):
    """One kind of optimizer; without state of its own, so one object serves all of a kind."""

    scratch = 0  # how many (n,) temporaries a step needs
    # Elements. Smaller ones fit a core's own cache better, but the calls then cost more than that
    # saves: measured from 16 Ki to 256 Ki, for engines that pass once and for torch's operations.
    chunk = 128 * 1024

    @abstractmethod
    def prepare(self, group: Group, figures: Figures, first: bool) -> StepChunk:
        """Count one step, in the figures; returns what steps each chunk of it.

        ``first``: nothing has been kept so far.
        """


def scalar_dtype() -> torch.dtype:
    """The dtype that torch's optimizers keep figures in."""
    double = torch.get_default_dtype() == torch.float64
    return torch.float64 if double else torch.float32


def count(figures: Figures) -> float:
    """One step more; the number of this step."""
    step = figures["step"]
    step += 1
    return step.item()


def directed(group: Group, gradient: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The gradient, (n,), or its opposite in ``out`` where the group maximizes."""
    return torch.neg(gradient, out=out) if group["maximize"] else gradient


def decayed(
    group: Group, parameter: torch.Tensor, gradient: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """The directed gradient with weight decay, (n,); in ``out`` if it differs from the gradient."""
    gradient = directed(group, gradient, out)
    decay = group["weight_decay"]
    return torch.add(gradient, parameter, alpha=decay, out=out) if decay else gradient


def number(value: Any) -> Any:
    """A hyper-parameter; one that is a tensor stays one, so that it rounds as it does in torch."""
    return value.squeeze() if isinstance(value, torch.Tensor) else value
