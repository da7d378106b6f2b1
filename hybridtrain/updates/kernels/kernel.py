"""The contract of a kernel: the arithmetic of one optimizer class, for the flat pass.

An optimizer is *elementwise* if the step of an element depends only on its own gradient, value and
state, and on figures of the whole parameter (the number of steps). Then parameters may be cut
anywhere and joined with their neighbours. A kernel names the optimizer's state, and steps one
chunk.

Legend: n elements of a chunk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

Group = dict[str, Any]  # hyper-parameters
Figures = dict[str, torch.Tensor]  # () each: torch's scalar state of a parameter, e.g. "step"
Tensors = Sequence[torch.Tensor]  # (n,) each
# parameter (n,), gradient (n,) not to be changed, state, scratch
StepChunk = Callable[[torch.Tensor, torch.Tensor, Tensors, Tensors], None]


class Kept(ABC):
    """The state of one optimizer class."""

    figures: tuple[str, ...] = ("step",)

    @abstractmethod
    def names(self, group: Group) -> tuple[str, ...]:
        """Torch's names of the state tensors, in the order of ``state``."""

    def start(self, group: Group) -> dict[str, float]:
        """Initial values of figures and state tensors, if not zero."""
        return {}

    def keeps(self, group: Group) -> bool:
        """Whether there is any state."""
        return True


class Kernel(Kept):
    """Steps chunks of one optimizer class; itself stateless."""

    scratch = 0  # number of (n,) temporaries
    # Elements. Smaller chunks fit a core's own cache better, but the calls cost more than that
    # saves: measured from 16 Ki to 256 Ki, for fused engines and for torch's operations.
    chunk = 128 * 1024

    @abstractmethod
    def prepare(self, group: Group, figures: Figures, first: bool) -> StepChunk:
        """Count one step in the figures; returns the function that steps each chunk.

        ``first``: there is no state yet.
        """


def scalar_dtype() -> torch.dtype:
    """The dtype of figures in torch's optimizers."""
    double = torch.get_default_dtype() == torch.float64
    return torch.float64 if double else torch.float32


def count(figures: Figures) -> float:
    """Increment the step; returns its number."""
    step = figures["step"]
    step += 1
    return step.item()


def directed(group: Group, gradient: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The gradient, (n,), negated in ``out`` if the group maximizes."""
    return torch.neg(gradient, out=out) if group["maximize"] else gradient


def decayed(
    group: Group, parameter: torch.Tensor, gradient: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """The directed gradient with weight decay, (n,); in ``out`` if it differs from the gradient."""
    gradient = directed(group, gradient, out)
    decay = group["weight_decay"]
    return torch.add(gradient, parameter, alpha=decay, out=out) if decay else gradient


def number(value: Any) -> Any:
    """A hyper-parameter; a tensor stays one, so that it rounds as in torch."""
    return value.squeeze() if isinstance(value, torch.Tensor) else value
