"""Outer optimizers of local SGD that PyTorch does not have.

They step the masters with pseudo-gradients (movements or elastic forces), not with gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hybridtrain.updates.groups import with_gradients
from hybridtrain.updates.optimizer_traits import evaluated
from hybridtrain.util.option_types import Decay, NotNegative, Positive, Share, typed


class Sum(torch.optim.SGD):
    """Subtracts the sum of all contributions, not their weighted mean."""

    sums = True


class DelayedNesterov(torch.optim.Optimizer):
    """Nesterov momentum for asynchronous local SGD.

    Liu et al. 2024 (arXiv:2401.09135), algorithm 3.

    The momentum is updated only every N-th time, with the mean of the last N movements. With a
    movement g, the learning rate ε, the momentum β and the activation c::

        Δ ← Δ + g
        every N-th time:  m ← β m + Δ / N;  w ← w - ε ((1 - c N + c) β m + g / N);  Δ ← 0
        else:             w ← w - ε (c β m + g / N)

    With c = 0, N movements from the same parameters equal one Nesterov step with their mean; with
    N = 1 it is ``torch.optim.SGD(nesterov=True)``.

    Args:
        params: as ``torch.optim`` takes them.
        lr: ε.
        momentum: β.
        buffer: N, as a rule the number of workers.
        activation: c, from 0 to 1 / N.

    Raises:
        ValueError: if one of them makes no sense.
    """

    @typed("")
    def __init__(
        self,
        params: Any,
        lr: NotNegative = 0.7,
        momentum: Decay = 0.9,
        buffer: Positive = 4,
        activation: Share = 0.0,
    ) -> None:
        if activation > 1 / buffer:
            raise ValueError(f"activation={activation} was given; it must be from 0 to 1 / buffer")
        defaults = {"lr": lr, "momentum": momentum, "buffer": buffer, "activation": activation}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step with one movement, in ``.grad``."""
        loss = evaluated(closure)
        for group, parameter, movement, state in with_gradients(self):
            self._move(parameter, movement, group, state)
        return loss

    @staticmethod
    def _move(
        parameter: torch.nn.Parameter,
        movement: torch.Tensor,
        group: dict[str, Any],
        state: dict[str, Any],
    ) -> None:
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float64)
            state["momentum"] = torch.zeros_like(parameter)
            state["gathered"] = torch.zeros_like(parameter)
        rate, n, share = group["lr"], group["buffer"], group["activation"]
        momentum, gathered = state["momentum"], state["gathered"]
        state["step"] += 1
        gathered.add_(movement)
        if int(state["step"]) % n == 0:
            momentum.mul_(group["momentum"]).add_(gathered, alpha=1 / n)
            gathered.zero_()
            share = 1 - share * n + share
        parameter.add_(momentum, alpha=-rate * share * group["momentum"])
        parameter.add_(movement, alpha=-rate / n)
