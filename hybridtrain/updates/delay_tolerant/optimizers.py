"""Optimizers for gradients that were computed at parameters of some updates ago.

They step with one worker's gradient at a time. ``read(worker)`` says that the worker has the
parameters as they are now; what it computes next, it computes there. In one process, where nothing
is late, each is AdaGrad (or its dual averaging form), and a checkpoint goes on in plain PyTorch.

Legend: g the gradient, ḡ the sum of all gradients so far, α the learning rate; all per element.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hybridtrain.util.option_types import Above0, NotNegative, typed


class DelayTolerant(torch.optim.Optimizer, ABC):
    """Steps with the gradient of one worker, knowing what that worker had read."""

    def read(self, worker: int) -> None:
        """The worker has the parameters as they are now."""

    @abstractmethod
    def step_late(self, worker: int | None, staleness: int) -> None:
        """Step with ``.grad``, computed by the worker at what it has read.

        Args:
            worker: ``None``: at the parameters as they are now.
            staleness: updates since that reading.
        """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step with a gradient at the parameters as they are now."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.step_late(None, 0)
        return loss

    def _with_gradients(self) -> Iterator[tuple[dict[str, Any], Parameter, Tensor, dict[str, Any]]]:
        """Each group, a parameter of it, its gradient and its state."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is not None:
                    dense = gradient.to_dense() if gradient.is_sparse else gradient
                    yield group, parameter, dense, self.state[parameter]


class _FromInitial(DelayTolerant):
    """Of those whose z has a value before the first gradient."""

    @typed("")
    def __init__(self, params: Any, lr: NotNegative = 0.01, initial: Above0 = 1.0) -> None:
        super().__init__(params, {"lr": lr, "initial": initial})


class AdaptiveRevision(_FromInitial):
    """McMahan and Streeter, "Delay-Tolerant Algorithms for Asynchronous Distributed Online
    Learning", NIPS 2014, Algorithm 1.

    With b the sum of the gradients applied since the worker's reading::

        z ← z + g² + 2 g b;  z' ← max(z', z)
        x ← x − α g / √z' + α (1/√z'_before − 1/√z') b

    It is AdaGrad if nothing is late, and AdaGrad on the sum of gradients that were all computed at
    one reading. It keeps three numbers per element, and one more for each worker.

    Args:
        params: as ``torch.optim`` takes them.
        lr: α.
        initial: z before the first gradient.

    Raises:
        ValueError: if ``lr`` is negative, or ``initial`` not above 0.
    """

    def __init__(self, params: Any, lr: float = 0.01, initial: float = 1.0) -> None:
        super().__init__(params, lr, initial)
        self._read: dict[int, dict[Tensor, Tensor]] = {}  # worker -> ḡ at its reading

    def read(self, worker: int) -> None:
        known = self._read.setdefault(worker, {})
        for parameter, state in self.state.items():
            if (kept := known.get(parameter)) is not None:
                kept.copy_(state["sum"])
            else:
                known[parameter] = state["sum"].clone()

    def step_late(self, worker: int | None, staleness: int) -> None:
        for group, parameter, gradient, state in self._with_gradients():
            if not state:
                state["z"] = torch.full_like(parameter, group["initial"])
                state["largest"], state["sum"] = state["z"].clone(), torch.zeros_like(parameter)
            missed = self._missed(worker, parameter, state["sum"])
            before = state["largest"].sqrt()
            state["z"].addcmul_(gradient, gradient)
            if missed is not None:
                state["z"].addcmul_(gradient, missed, value=2.0)
            torch.maximum(state["largest"], state["z"], out=state["largest"])
            now = state["largest"].sqrt()
            parameter.addcdiv_(gradient, now, value=-group["lr"])
            if missed is not None:
                revision = before.reciprocal_().sub_(now.reciprocal_())
                parameter.addcmul_(revision, missed, value=group["lr"])
            state["sum"].add_(gradient)

    def _missed(self, worker: int | None, parameter: Parameter, total: Tensor) -> Tensor | None:
        """The sum of the gradients since the worker's reading; ``None``: nothing.

        A worker that is not known has read the parameters before the first step.
        """
        if worker is None:
            return None
        read = self._read.get(worker, {}).get(parameter)
        return total.clone() if read is None else total - read


class AsyncAdaDA(_FromInitial):
    """Asynchronous AdaGrad by dual averaging (Duchi, Jordan and McMahan, NIPS 2013), a baseline of
    McMahan and Streeter (2014)::

        z ← z + g²;  ḡ ← ḡ + g;  x ← x₀ − α ḡ / √z

    Args:
        params: as ``torch.optim`` takes them.
        lr: α.
        initial: z before the first gradient.

    Raises:
        ValueError: if ``lr`` is negative, or ``initial`` not above 0.
    """

    def step_late(self, worker: int | None, staleness: int) -> None:
        for group, parameter, gradient, state in self._with_gradients():
            if not state:
                state["z"] = torch.full_like(parameter, group["initial"])
                state["origin"], state["sum"] = parameter.clone(), torch.zeros_like(parameter)
            state["z"].addcmul_(gradient, gradient)
            state["sum"].add_(gradient)
            parameter.copy_(state["origin"])
            parameter.addcdiv_(state["sum"], state["z"].sqrt(), value=-group["lr"])


class AdaDelay(DelayTolerant):
    """Sra, Yu, Li and Smola, "AdaDelay", AISTATS 2016 (arXiv:1508.05003), per coordinate.

    At the t-th gradient, which is τ updates late::

        s ← s + t/(t + τ) g²;  x ← x − α g / (L + √(s (t + τ)/t) + ε)

    With τ = 0 and L = 0 it is AdaGrad.

    Args:
        params: as ``torch.optim`` takes them.
        lr: α.
        smoothness: L.
        eps: ε.

    Raises:
        ValueError: if any of them is negative.
    """

    @typed("")
    def __init__(
        self,
        params: Any,
        lr: NotNegative = 0.01,
        smoothness: NotNegative = 0.0,
        eps: NotNegative = 1e-10,
    ) -> None:
        super().__init__(params, {"lr": lr, "smoothness": smoothness, "eps": eps})

    def step_late(self, worker: int | None, staleness: int) -> None:
        for group, parameter, gradient, state in self._with_gradients():
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float64)
                state["sum"] = torch.zeros_like(parameter)
            state["step"] += 1
            share = float(state["step"]) / (float(state["step"]) + staleness)
            state["sum"].addcmul_(gradient, gradient, value=share)
            length = (state["sum"] / share).sqrt_().add_(group["smoothness"] + group["eps"])
            parameter.addcdiv_(gradient, length, value=-group["lr"])
