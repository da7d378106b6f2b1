"""Optimizers that know the staleness of each gradient, and the update that steps them.

They step with one worker's gradient at a time; ``read(worker)`` says at which parameters the
worker computes its next one. In one process, without staleness, each is AdaGrad (or its dual
averaging form), and a checkpoint can be continued in plain PyTorch. Corrections that work with any
optimizer are in ``updates/staleness``.

Legend: g the gradient, ḡ the sum of all gradients so far, α the learning rate; all per element.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hybridtrain.engine.memory import Store
from hybridtrain.engine.updates.base import Again, Contribution, StepInput
from hybridtrain.engine.updates.groups import evaluated, slowed, with_gradients
from hybridtrain.engine.updates.per_tensor import PerTensorUpdate, clip_gradients
from hybridtrain.util.option_types import Above0, NotNegative, typed


class DelayTolerant(torch.optim.Optimizer, ABC):
    """Steps with the gradient of one worker at the parameters that it read."""

    def read(self, worker: int) -> None:
        """The worker reads the current parameters."""

    @abstractmethod
    def step_late(self, worker: int | None, staleness: int) -> None:
        """Step with ``.grad``, computed by the worker at the parameters that it read.

        Args:
            worker: ``None``: at the current parameters.
            staleness: updates since the worker read them.
        """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step with a gradient at the current parameters."""
        loss = evaluated(closure)
        self.step_late(None, 0)
        return loss


class _FromInitial(DelayTolerant):
    """Base of optimizers with an initial value of z."""

    @typed("")
    def __init__(self, params: Any, lr: NotNegative = 0.01, initial: Above0 = 1.0) -> None:
        super().__init__(params, {"lr": lr, "initial": initial})


class AdaptiveRevision(_FromInitial):
    """McMahan and Streeter, "Delay-Tolerant Algorithms for Asynchronous Distributed Online
    Learning", NIPS 2014, Algorithm 1.

    With b the sum of the gradients applied since the worker read the parameters::

        z ← z + g² + 2 g b;  z' ← max(z', z)
        x ← x − α g / √z' + α (1/√z'_before − 1/√z') b

    It equals AdaGrad without staleness, and AdaGrad on the sum of gradients that were computed at
    the same parameters. It keeps three numbers per element, and one more for each worker.

    Args:
        params: as ``torch.optim`` takes them.
        lr: α, the learning rate.
        initial: z before the first gradient.

    Raises:
        ValueError: if ``lr`` is negative, or ``initial`` not above 0.
    """

    def __init__(self, params: Any, lr: float = 0.01, initial: float = 1.0) -> None:
        super().__init__(params, lr, initial)
        self._read: dict[int, dict[Tensor, Tensor]] = {}  # worker -> ḡ when it read

    def read(self, worker: int) -> None:
        known = self._read.setdefault(worker, {})
        for parameter, state in self.state.items():
            if (kept := known.get(parameter)) is not None:
                kept.copy_(state["sum"])
            else:
                known[parameter] = state["sum"].clone()

    def step_late(self, worker: int | None, staleness: int) -> None:
        for group, parameter, gradient, state in with_gradients(self):
            if not state:
                state["z"] = torch.full_like(parameter, group["initial"])
                state["largest"], state["sum"] = state["z"].clone(), torch.zeros_like(parameter)
                for known in self._read.values():  # sums of a state that user code has replaced
                    known.pop(parameter, None)
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
        """The sum of the gradients since the worker read the parameters; ``None``: none.

        An unknown worker read them before the first step.
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
        lr: α, the learning rate.
        initial: z before the first gradient.

    Raises:
        ValueError: if ``lr`` is negative, or ``initial`` not above 0.
    """

    def step_late(self, worker: int | None, staleness: int) -> None:
        for group, parameter, gradient, state in with_gradients(self):
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
        lr: α, the learning rate.
        smoothness: L, added to the denominator.
        eps: ε, added to it as well.

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
        for group, parameter, gradient, state in with_gradients(self):
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float64)
                state["sum"] = torch.zeros_like(parameter)
            state["step"] += 1
            share = float(state["step"]) / (float(state["step"]) + staleness)
            state["sum"].addcmul_(gradient, gradient, value=share)
            length = (state["sum"] / share).sqrt_().add_(group["smoothness"] + group["eps"])
            parameter.addcdiv_(gradient, length, value=-group["lr"])


class DelayTolerantUpdate(PerTensorUpdate):
    """Steps once for each contribution, weighted by its share.

    Args:
        optimizer: over views of the masters, in host memory.
        numbers: the slot number of each of its parameters, group by group.
        store: the shared rows.
    """

    wants_staleness = True

    def __init__(self, optimizer: DelayTolerant, numbers: Sequence[int], store: Store) -> None:
        super().__init__(optimizer, numbers, store)
        self._delay_tolerant, self._held = optimizer, store.held
        self._kept: list[tuple[Contribution, list[Tensor | None]]] = []

    def read(self, worker: int) -> None:
        with torch.no_grad():
            self._delay_tolerant.read(worker)

    def hold(self, contribution: Contribution) -> bool:
        """One that counts as it is, whatever others there are."""
        if self.sums:
            found = (self._gradient(n, contribution) for n in range(len(self._parameters)))
            kept = [None if gradient is None else gradient.clone() for gradient in found]
            self._kept.append((contribution, kept))
        return self.sums

    def step(self, given: StepInput) -> Again | None:
        kept, self._kept = self._kept, []
        for each, gradients in kept:
            self._step_with(each, gradients, given)
        for each in given.contributions:
            found = [self._mean(index, [each]) for index in range(len(self._parameters))]
            self._step_with(each, found, given)
        return None

    def _step_with(
        self, each: Contribution, gradients: Sequence[Tensor | None], given: StepInput
    ) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        clip_gradients([p.grad for p in self._parameters if p.grad is not None], given.clip)
        with slowed(self._optimizer.param_groups, given.rate):
            worker = None if each.worker == self._held else each.worker
            self._delay_tolerant.step_late(worker, each.staleness)
