"""Adam and its relatives, in torch's own operations and their order: the bits of ``fused=False``.

Each class follows the ``_single_tensor_...`` function of its module in ``torch.optim``, with
scratch in place of temporaries.
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


class _Averages(Kernel):
    """Keeps decaying averages of the gradient and of its square."""

    scratch = 2

    def names(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq") + ("max_exp_avg_sq",) * bool(group.get("amsgrad"))

    @staticmethod
    def gradient(group: Group, p: torch.Tensor, g: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """The gradient to be averaged, (n,); decoupled weight decay shrinks the parameter."""
        if not group["decoupled_weight_decay"]:
            return decayed(group, p, g, out)
        if group["weight_decay"]:
            p.mul_(1 - number(group["lr"]) * group["weight_decay"])
        return directed(group, g, out)

    @staticmethod
    def average(g: torch.Tensor, state: Tensors, beta1: float, beta2: float) -> None:
        """Take the gradient into both averages."""
        state[0].lerp_(g, 1 - beta1)
        state[1].mul_(beta2).addcmul_(g, g, value=1 - beta2)


class PlainAdam(_Averages):
    """Adam and AdamW with ``fused=False``."""

    def prepare(self, group: Group, figures: Figures, first: bool) -> StepChunk:
        beta1, beta2 = map(number, group["betas"])
        steps, eps, amsgrad = count(figures), group["eps"], group["amsgrad"]
        size = number(group["lr"]) / (1 - beta1**steps)
        correction = (1 - beta2**steps) ** 0.5

        def step(p: torch.Tensor, g: torch.Tensor, state: Tensors, scratch: Tensors) -> None:
            g = self.gradient(group, p, g, scratch[0])
            self.average(g, state, beta1, beta2)
            second = torch.maximum(state[2], state[1], out=state[2]) if amsgrad else state[1]
            below = torch.sqrt(second, out=scratch[1]).div_(correction).add_(eps)
            p.addcdiv_(state[0], below, value=-size)

        return step


class NAdam(_Averages):
    """Adam with Nesterov momentum."""

    figures = ("step", "mu_product")

    def start(self, group: Group) -> dict[str, float]:
        return {"mu_product": 1.0}

    def prepare(self, group: Group, figures: Figures, first: bool) -> StepChunk:
        beta1, beta2 = map(number, group["betas"])
        steps, lr, decay = count(figures), number(group["lr"]), group["momentum_decay"]
        correction, eps = 1 - beta2**steps, group["eps"]
        mu = beta1 * (1.0 - 0.5 * (0.96 ** (steps * decay)))
        following = beta1 * (1.0 - 0.5 * (0.96 ** ((steps + 1) * decay)))
        product = figures["mu_product"]
        product *= mu
        of_gradient = -lr * (1.0 - mu) / (1.0 - product.item())
        of_average = (-lr * following) / (1.0 - product.item() * following)

        def step(p: torch.Tensor, g: torch.Tensor, state: Tensors, scratch: Tensors) -> None:
            g = self.gradient(group, p, g, scratch[0])
            self.average(g, state, beta1, beta2)
            below = torch.div(state[1], correction, out=scratch[1]).sqrt_().add_(eps)
            p.addcdiv_(g, below, value=of_gradient)
            p.addcdiv_(state[0], below, value=of_average)

        return step


class RAdam(_Averages):
    """Adam that begins as SGD with momentum."""

    def prepare(self, group: Group, figures: Figures, first: bool) -> StepChunk:
        beta1, beta2 = map(number, group["betas"])
        steps, lr, eps = count(figures), number(group["lr"]), group["eps"]
        correction1, correction2 = 1 - beta1**steps, 1 - beta2**steps
        last = 2 / (1 - beta2) - 1
        length = last - 2 * steps * (beta2**steps) / correction2
        rectified = length > 5.0
        above = (length - 4) * (length - 2) * last
        rect = (above / ((last - 4) * (last - 2) * length)) ** 0.5 if rectified else 1.0

        def step(p: torch.Tensor, g: torch.Tensor, state: Tensors, scratch: Tensors) -> None:
            g = self.gradient(group, p, g, scratch[0])
            self.average(g, state, beta1, beta2)
            move = torch.div(state[0], correction1, out=scratch[0]).mul_(lr)
            if rectified:
                below = torch.sqrt(state[1], out=scratch[1]).add_(eps)
                adapted = below.reciprocal_().mul_(correction2**0.5)  # as scalar / tensor does
                move.mul_(adapted).mul_(rect)
            p.add_(move, alpha=-1.0)

        return step


class Adamax(Kernel):
    """Adam with the infinity norm."""

    scratch = 2

    def names(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_inf")

    def prepare(self, group: Group, figures: Figures, first: bool) -> StepChunk:
        beta1, beta2 = map(number, group["betas"])
        eps = group["eps"]
        rate = number(group["lr"]) / (1 - beta1 ** count(figures))

        def step(p: torch.Tensor, g: torch.Tensor, state: Tensors, scratch: Tensors) -> None:
            g = decayed(group, p, g, scratch[0])
            state[0].lerp_(g, 1 - beta1)
            size = torch.abs(g, out=scratch[1]).add_(eps)
            torch.maximum(state[1].mul_(beta2), size, out=state[1])
            p.addcdiv_(state[0], state[1], value=-rate)

        return step
