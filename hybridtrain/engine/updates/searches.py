"""Batch optimizers that search along a line, with one evaluation of the whole loss for each update.

Theory of operation. ``optimizer.step(closure)`` makes one iteration on a thread that takes turns
with the server. Its parameters are a point of its own, the *trial*; the masters are the point that
it has accepted last. Each call of the closure takes the next evaluation, and where there is none
yet the step is suspended until all workers have evaluated at the trial. When the step ends, the
masters move, and the next step begins at once, with the evaluation that is known there.

A step that is suspended cannot be saved. So a checkpoint has the optimizer's state as the step
began, and the evaluations since: a resumed run makes the step again with them, to the bit.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from hashlib import blake2b
from typing import Any, NamedTuple

import torch

from hybridtrain.engine.memory import Store
from hybridtrain.engine.updates.base import Evaluation, SavedOptimizer
from hybridtrain.engine.updates.kernels.choice import step_of
from hybridtrain.engine.updates.per_tensor import PerTensorUpdate
from hybridtrain.errors import UserError
from hybridtrain.util.option_types import Above0, NotNegative, Positive, typed
from hybridtrain.util.turn_taking import Asked, TurnTaking

_MOST = 25  # evaluations of one line search, as in torch's
EVALUATIONS = "evaluations"  # in the state of the first parameter


class Searches:
    """Mark of an optimizer whose step is one iteration, and takes evaluations of the whole loss."""


class LBFGS(Searches, torch.optim.LBFGS):
    """torch's L-BFGS with its strong Wolfe line search, over all parameters.

    Args:
        params: as ``torch.optim`` takes them.
        lr: the first step that a line search tries; in the first iteration its length.
        history_size: how many steps the curvature is known from.
        tolerance_grad: no element of the gradient is larger at the end.
    """

    @typed("")
    def __init__(
        self,
        params: Any,
        lr: Above0 = 1.0,
        history_size: Positive = 10,
        tolerance_grad: NotNegative = 1e-7,
    ) -> None:
        super().__init__(
            together(params),
            lr,
            max_iter=1,
            max_eval=_MOST + 1,
            tolerance_grad=tolerance_grad,
            tolerance_change=0.0,  # torch's ends where losses or gradients are small numbers
            history_size=history_size,
            line_search_fn="strong_wolfe",
        )

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        """One iteration. The first one tries a step of length ``lr``, as L-BFGS-B does: torch's is
        shorter the more parameters there are, which costs evaluations.
        """
        group = self.param_groups[0]
        if self.state[group["params"][0]].get("n_iter"):
            return super().step(closure)
        known, rate = [closure()], group["lr"]
        gradients = [p.grad for p in group["params"] if p.grad is not None]
        total = sum(float(gradient.abs().sum()) for gradient in gradients)
        length = float(torch.nn.utils.get_total_norm(gradients))
        group["lr"] = rate * max(total, 1.0) / length if length else rate
        try:
            return super().step(lambda: known.pop() if known else closure())
        finally:
            group["lr"] = rate


class GradientDescent(Searches, torch.optim.Optimizer):
    """Gradient descent with a backtracking line search (Armijo 1966).

    With the loss f and its gradient g at w, the rate ε is halved until
    f(w - ε g) <= f(w) - c ε |g|²; the next search begins with twice the rate that was found.

    Args:
        params: as ``torch.optim`` takes them.
        lr: the first rate that is tried.
        decrease: c, the share of the decrease that the gradient promises.
        tolerance_grad: no element of the gradient is larger at the end.
    """

    @typed("")
    def __init__(
        self,
        params: Any,
        lr: Above0 = 1.0,
        decrease: Above0 = 1e-4,
        tolerance_grad: NotNegative = 1e-7,
    ) -> None:
        defaults = {"lr": lr, "decrease": decrease, "tolerance_grad": tolerance_grad}
        super().__init__(together(params), defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        """One line search from where the parameters are."""
        closure = torch.enable_grad()(closure)
        group = self.param_groups[0]
        points = [p for p in group["params"] if p.numel()]
        loss = closure()
        pairs = [(p, p.grad) for p in points if p.grad is not None]
        if max((float(g.abs().max()) for _, g in pairs), default=0.0) <= group["tolerance_grad"]:
            return loss
        before = [p.clone() for p, _ in pairs]
        square = sum(float(g.double().square().sum()) for _, g in pairs)
        state = self.state[group["params"][0]]
        rate = state.get("rate", group["lr"] / 2) * 2
        for _ in range(_MOST):
            for (p, g), start in zip(pairs, before, strict=True):
                torch.sub(start, g, alpha=rate, out=p)
            if float(closure()) <= float(loss) - group["decrease"] * rate * square:
                state["rate"] = rate
                return loss
            rate /= 2
        for (p, _), start in zip(pairs, before, strict=True):
            p.copy_(start)
        return loss


def together(params: Any) -> list[Any]:
    """The parameters of all groups: one line is searched for all."""
    return [p for each in params for p in (each["params"] if isinstance(each, dict) else [each])]


class _Known(NamedTuple):
    """An evaluation: the loss, and the gradient of each parameter."""

    loss: float
    gradients: tuple[torch.Tensor | None, ...]


class SearchUpdate(PerTensorUpdate):
    """Moves the masters to the points that a line search accepts.

    Args:
        optimizer: over views of the masters, which become points of its own.
        numbers: the slot number of each of its parameters.
        store: the shared rows.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, numbers: Sequence[int], store: Store
    ) -> None:
        super().__init__(optimizer, numbers, store)
        self._masters = [parameter.data for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.data = _copied(parameter.data)
        self._turns = TurnTaking()
        self._points: list[bytes] = []  # digests: where the loss was evaluated
        self._ended = False  # no further step would move the masters
        own = self._optimizer.state[self._parameters[0]]
        self._known = [_Known(*each) for each in own.pop(EVALUATIONS, ())]
        self._begun = _kept(own)  # the state as the step began
        if self._known:
            with torch.no_grad():
                self._begin()

    @property
    def trial(self) -> Mapping[int, torch.Tensor]:  # type: ignore[override]
        """The point to evaluate next, while a line is searched."""
        return {} if self._ended else dict(zip(self._numbers, self._parameters, strict=True))

    def _advance(self, evaluation: Evaluation) -> None:
        if self._ended:
            return
        loss = evaluation.loss
        if loss is None or not math.isfinite(loss):
            raise UserError(
                f"the loss of a whole pass is {loss}, which no line search can compare; look at "
                "the data, or begin with a smaller strategy.update.lr"
            )
        gradients = tuple(None if p.grad is None else _copied(p.grad) for p in self._parameters)
        self._known.append(_Known(loss, gradients))
        if len(self._known) == 1:
            self._begin()
        else:
            self._go_on(self._turns.answer(None))

    def _begin(self) -> None:
        """One step begins where the masters are, whose evaluation is known."""
        self._points.clear()
        self._go_on(self._turns.start(self._step))

    def _go_on(self, turn: Any) -> None:
        """The step is suspended; or it has ended, and the next one begins."""
        if isinstance(turn, Asked):
            return
        if turn.error is not None:
            raise turn.error
        place = self._points.index(here) if (here := self._digest()) in self._points else 0
        before, now = self._known[0].loss, self._known[place].loss
        if place == 0 or now >= before:
            self._end(before)
            return
        torch._foreach_copy_(self._masters, [parameter.data for parameter in self._parameters])
        self._known = [self._known[place]]
        self._begun = _kept(self._optimizer.state[self._parameters[0]])
        self._begin()

    def _end(self, loss: float) -> None:
        self._ended = True
        tried = len(self._known) - 1
        found = f"has found no lower point in {tried} evaluations" if tried else "is at a minimum"
        warnings.warn(
            f"{self.name} {found}: the parameters stay where the loss is {loss:.9g}, and further "
            "epochs would change nothing",
            stacklevel=2,
        )

    # ---- on the other thread --------------------------------------------------------------------

    def _step(self) -> None:
        """One step, with the evaluations that are known, and those that will be."""

        def closure() -> torch.Tensor:
            place = len(self._points)
            self._points.append(self._digest())
            while place >= len(self._known):
                self._turns.ask(None)
            for parameter, gradient in zip(
                self._parameters, self._known[place].gradients, strict=True
            ):
                parameter.grad = gradient
            return torch.tensor(self._known[place].loss, dtype=torch.float64)

        step_of(self._optimizer)(self._optimizer, closure)

    def _digest(self) -> bytes:
        found = blake2b()
        for parameter in self._parameters:
            found.update(parameter.detach().contiguous().view(-1).view(torch.uint8).numpy())
        return found.digest()

    # ---- state ----------------------------------------------------------------------------------

    def state(self) -> SavedOptimizer:
        own = self._begun | {EVALUATIONS: [tuple(each) for each in self._known]}
        saved = super().state()
        saved.parameters[self._numbers[0]] = own
        return saved

    def close(self) -> None:
        self._turns.close()


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous: torch's L-BFGS views each gradient as a vector."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _kept(state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that the next step does not change: it extends lists, and writes to one tensor."""
    return {
        name: value.clone() if name == "prev_flat_grad" and value is not None else copy(value)
        for name, value in state.items()
    }
