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
from functools import partial
from typing import Any

import torch

Group = dict[str, Any]  # hyper-parameters
Figures = dict[str, torch.Tensor]  # () each: torch's scalar state of a parameter, e.g. "step"
Tensors = Sequence[torch.Tensor]  # (n,) each
# parameter (n,), gradient (n,) not to be changed, state, scratch
StepChunk = Callable[[torch.Tensor, torch.Tensor, Tensors, Tensors], None]


class KernelState(ABC):
    """The state of one optimizer class."""

    figures: tuple[str, ...] = ("step",)
    may_be_rounded = True  # the state tensors, to fewer digits than the parameters have

    @abstractmethod
    def names(self, group: Group) -> tuple[str, ...]:
        """Torch's names of the state tensors, in the order of ``state``."""

    def start(self, group: Group) -> dict[str, float]:
        """Initial values of figures and state tensors, if not zero."""
        return {}

    def keeps(self, group: Group) -> bool:
        """Whether there is any state."""
        return True


class Kernel(KernelState):
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


# ---- Adam and SGD with torch's fused engines ----------------------------------------------------
# ``torch._fused_adam_`` and the like implement ``fused=True``. They are private, but all supported
# versions of torch have them.


class FusedAdam(Kernel):
    """Adam and AdamW; the bits of ``fused=True``."""

    def names(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq") + ("max_exp_avg_sq",) * bool(group["amsgrad"])

    def prepare(self, group: Group, figures: Figures, first: bool) -> StepChunk:
        decoupled = group.get("decoupled_weight_decay", False)
        engine = torch._fused_adamw_ if decoupled else torch._fused_adam_
        beta1, beta2 = map(float, group["betas"])
        numbers = {name: float(group[name]) for name in ("lr", "weight_decay", "eps")}
        flags = {name: bool(group[name]) for name in ("amsgrad", "maximize")}
        run = partial(engine, beta1=beta1, beta2=beta2, **numbers, **flags)
        figures["step"] += 1
        steps = [figures["step"]]

        def step(p: torch.Tensor, g: torch.Tensor, state: Tensors, scratch: Tensors) -> None:
            run([p], [g], [state[0]], [state[1]], list(state[2:]), steps)

        return step


class FusedSgd(Kernel):
    """SGD, with or without momentum; its bits do not depend on ``fused``."""

    figures = ()

    def names(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) * bool(group["momentum"])

    def keeps(self, group: Group) -> bool:
        return bool(group["momentum"])

    def prepare(self, group: Group, figures: Figures, first: bool) -> StepChunk:
        names = ("lr", "momentum", "weight_decay", "dampening")
        numbers = {name: float(group[name]) for name in names}
        flags = {name: bool(group[name]) for name in ("nesterov", "maximize")}
        run = partial(torch._fused_sgd_, is_first_step=first, **numbers, **flags)

        def step(p: torch.Tensor, g: torch.Tensor, state: Tensors, scratch: Tensors) -> None:
            run([p], [g], list(state))

        return step


# ---- Adagrad and RMSprop with torch's operations in torch's order -------------------------------
# Each class follows the ``_single_tensor_...`` function of its module in ``torch.optim``, with
# reused temporaries, and has the bits of ``fused=False`` and ``foreach=False``.


class PlainAdagrad(Kernel):
    """Adagrad without ``fused``."""

    scratch = 2

    def names(self, group: Group) -> tuple[str, ...]:
        return ("sum",)

    def start(self, group: Group) -> dict[str, float]:
        return {"sum": float(group["initial_accumulator_value"])}

    def prepare(self, group: Group, figures: Figures, first: bool) -> StepChunk:
        eps = group["eps"]
        rate = number(group["lr"]) / (1 + (count(figures) - 1) * group["lr_decay"])

        def step(p: torch.Tensor, g: torch.Tensor, state: Tensors, scratch: Tensors) -> None:
            g = decayed(group, p, g, scratch[0])
            state[0].addcmul_(g, g, value=1)
            p.addcdiv_(g, torch.sqrt(state[0], out=scratch[1]).add_(eps), value=-rate)

        return step


class RmsProp(Kernel):
    """RMSprop, also centered and with momentum."""

    scratch = 2

    def names(self, group: Group) -> tuple[str, ...]:
        momentum, centered = group["momentum"] > 0, bool(group["centered"])
        return ("square_avg",) + ("momentum_buffer",) * momentum + ("grad_avg",) * centered

    def prepare(self, group: Group, figures: Figures, first: bool) -> StepChunk:
        lr, alpha, momentum = number(group["lr"]), group["alpha"], group["momentum"]
        eps, centered = group["eps"], group["centered"]
        count(figures)

        def step(p: torch.Tensor, g: torch.Tensor, state: Tensors, scratch: Tensors) -> None:
            g = decayed(group, p, g, scratch[0])
            below = state[0].mul_(alpha).addcmul_(g, g, value=1 - alpha)
            if centered:
                average = state[-1].lerp_(g, 1 - alpha)
                below = torch.addcmul(below, average, average, value=-1, out=scratch[1])
            below = torch.sqrt(below, out=scratch[1]).add_(eps)
            if momentum > 0:
                p.add_(state[1].mul_(momentum).addcdiv_(g, below), alpha=-lr)
            else:
                p.addcdiv_(g, below, value=-lr)

        return step
