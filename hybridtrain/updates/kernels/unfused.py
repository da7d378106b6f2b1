"""The other elementwise optimizers, in torch's own operations and their order.

Each class follows the ``_single_tensor_...`` function of its module in ``torch.optim``, with
scratch in place of temporaries, and so has the bits of ``foreach=False``.
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
    """RMSprop, perhaps centered, perhaps with momentum."""

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


class Adadelta(Kernel):
    """Adadelta."""

    scratch = 3

    def names(self, group: Group) -> tuple[str, ...]:
        return ("square_avg", "acc_delta")

    def prepare(self, group: Group, figures: Figures, first: bool) -> StepChunk:
        lr, rho, eps = number(group["lr"]), group["rho"], group["eps"]
        count(figures)

        def step(p: torch.Tensor, g: torch.Tensor, state: Tensors, scratch: Tensors) -> None:
            g = decayed(group, p, g, scratch[0])
            state[0].mul_(rho).addcmul_(g, g, value=1 - rho)
            below = torch.add(state[0], eps, out=scratch[1]).sqrt_()
            delta = torch.add(state[1], eps, out=scratch[2]).sqrt_().div_(below).mul_(g)
            state[1].mul_(rho).addcmul_(delta, delta, value=1 - rho)
            p.add_(delta, alpha=-lr)

        return step


class Asgd(Kernel):
    """Averaged SGD."""

    figures = ("step", "eta", "mu")
    scratch = 1

    def names(self, group: Group) -> tuple[str, ...]:
        return ("ax",)

    def start(self, group: Group) -> dict[str, float]:
        return {"eta": number(group["lr"]), "mu": 1.0}

    def prepare(self, group: Group, figures: Figures, first: bool) -> StepChunk:
        steps, lr, fading = count(figures), number(group["lr"]), group["lambd"]
        eta, mu, weight = figures["eta"].item(), figures["mu"].item(), figures["mu"].clone()
        figures["eta"].fill_(lr / ((1 + fading * lr * steps) ** group["alpha"]))
        figures["mu"].fill_(1 / max(1, steps - group["t0"]))

        def step(p: torch.Tensor, g: torch.Tensor, state: Tensors, scratch: Tensors) -> None:
            g = decayed(group, p, g, scratch[0])
            p.mul_(1 - fading * eta)
            p.add_(g, alpha=-eta)
            if mu == 1:
                state[0].copy_(p)
            else:
                state[0].add_(torch.sub(p, state[0], out=scratch[0]).mul_(weight))

        return step


class Rprop(Kernel):
    """Resilient backpropagation: only the sign of a gradient counts."""

    scratch = 3

    def names(self, group: Group) -> tuple[str, ...]:
        return ("prev", "step_size")

    def start(self, group: Group) -> dict[str, float]:
        return {"step_size": number(group["lr"])}

    def prepare(self, group: Group, figures: Figures, first: bool) -> StepChunk:
        (lower, higher), (least, most) = group["etas"], group["step_sizes"]
        count(figures)

        def step(p: torch.Tensor, g: torch.Tensor, state: Tensors, scratch: Tensors) -> None:
            g = directed(group, g, scratch[0])
            before, size = state
            sign = torch.mul(g, before, out=scratch[1]).sign_()
            sign.masked_fill_(sign.gt(0), higher).masked_fill_(sign.lt(0), lower)
            size.mul_(sign.masked_fill_(sign.eq(0), 1)).clamp_(least, most)
            before.copy_(g).masked_fill_(sign.eq(lower), 0)
            p.addcmul_(torch.sign(before, out=scratch[2]), size, value=-1)

        return step
