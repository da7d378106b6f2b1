"""Adam, Adagrad and RMSprop with torch's operations in torch's order.

Each class follows the ``_single_tensor_...`` function of its module in ``torch.optim``, with
reused temporaries, and has the bits of ``fused=False`` and ``foreach=False``.
"""

from __future__ import annotations

import torch

from hybridtrain.updates.kernels.kernel import (
    Figures,
    Group,
    Kernel,
    StepChunk,
    Tensors,
    count,
    decayed,
    directed,
    number,
)


class PlainAdam(Kernel):
    """Adam and AdamW with ``fused=False``."""

    scratch = 2

    def names(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq") + ("max_exp_avg_sq",) * bool(group["amsgrad"])

    def prepare(self, group: Group, figures: Figures, first: bool) -> StepChunk:
        beta1, beta2 = map(number, group["betas"])
        lr, eps, amsgrad = number(group["lr"]), group["eps"], group["amsgrad"]
        steps = count(figures)
        size = lr / (1 - beta1**steps)
        correction = (1 - beta2**steps) ** 0.5
        decoupled, shrinks = group["decoupled_weight_decay"], bool(group["weight_decay"])
        rest = 1 - lr * group["weight_decay"]

        def step(p: torch.Tensor, g: torch.Tensor, state: Tensors, scratch: Tensors) -> None:
            if decoupled and shrinks:
                p.mul_(rest)
            out = scratch[0]
            g = directed(group, g, out) if decoupled else decayed(group, p, g, out)
            state[0].lerp_(g, 1 - beta1)
            state[1].mul_(beta2).addcmul_(g, g, value=1 - beta2)
            second = torch.maximum(state[2], state[1], out=state[2]) if amsgrad else state[1]
            below = torch.sqrt(second, out=scratch[1]).div_(correction).add_(eps)
            p.addcdiv_(state[0], below, value=-size)

        return step


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
