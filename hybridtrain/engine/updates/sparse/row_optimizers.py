"""Optimizers for embeddings with sparse gradients, whose rows are stepped independently.

``torch.optim.SGD`` with momentum moves every row in every step, and ``torch.optim.SparseAdam``
corrects a row's moments by the number of all steps, so that the first step of a row that occurs
late is up to 3.16 learning rates long. Here a row without a gradient costs nothing; its missed
steps are computed at its next gradient.

Theory of operation of deferred momentum. A row with momentum m and no gradients still moves: step s
moves it by −η_s · m · Π μ. So after the steps a + 1 … t it has moved by −m · G(a), and its momentum
is m · C(a), with C(a) = Π μ_s and G(a) = Σ η_s · Π_{r ≤ s} μ_r over s = a + 1 … t. Both are kept
for every a; a step changes only the last few hundred of them, as C of earlier ones has vanished.
This holds for every schedule of rate and momentum.

Legend: R rows, n with a gradient, each of shape (...); t steps so far.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from hybridtrain.engine.updates.groups import evaluated
from hybridtrain.errors import UserError
from hybridtrain.util.option_types import Decay, NotNegative, typed

_STEP, _MOMENTUM, _LAST, _COUNTS = "step", "momentum_buffer", "last_step", "row_steps"
_VANISHED = 1e-30  # decay below which a momentum is negligible
_BEGUN = 1024  # steps for which memory is allocated at first


class _RowOptimizer(torch.optim.Optimizer, ABC):
    """Steps the rows of each coalesced gradient; a dense one has all rows."""

    steps_rows = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for kept in self.state.values():  # torch loads counts in the parameter's dtype
            kept |= {key: kept[key].long() for key in (_LAST, _COUNTS) if key in kept}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the rows that have a gradient. ``closure`` is called once, first."""
        loss = evaluated(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_rows(parameter, group, *_rows_of(parameter))
        return loss

    @abstractmethod
    def _step_rows(
        self, parameter: Tensor, group: Mapping[str, Any], rows: Tensor, gradient: Tensor
    ) -> None:
        """``rows`` (n,), each once; ``gradient`` (n, ...), not to be changed."""


class SparseMomentum(_RowOptimizer):
    """SGD with momentum that moves only rows with a gradient.

    Args:
        params: parameters or groups; each at least one-dimensional.
        lr: step size.
        momentum: decay of the momentum, from 0 up to 1.
        idle: the momentum of a row without a gradient. ``"lazy"``: it neither moves the row nor
            decays, as in MXNet's lazy update. ``"deferred"``: the row's missed steps are made at
            its next gradient and by :meth:`catch_up`; then the parameters are those of dense
            momentum on the same gradients, to rounding.

    Raises:
        UserError: for an option out of its range.
    """

    @typed("")
    def __init__(
        self,
        params: Iterable[Any],
        lr: NotNegative = 0.01,
        momentum: Decay = 0.9,
        idle: Literal["lazy", "deferred"] = "deferred",
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "idle": idle})
        self._paths: dict[Tensor, _Path] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._paths = {}  # not part of the state

    def _step_rows(
        self, parameter: Tensor, group: Mapping[str, Any], rows: Tensor, gradient: Tensor
    ) -> None:
        state, rate = self.state[parameter], float(group["lr"])
        if not state:
            state[_STEP] = 0
            state[_MOMENTUM] = torch.zeros_like(parameter)
            if group["idle"] == "deferred":
                state[_LAST] = torch.zeros(len(parameter), dtype=torch.int64)
        state[_STEP] += 1
        values = parameter.index_select(0, rows)
        momentum = state[_MOMENTUM].index_select(0, rows)
        if group["idle"] == "deferred":
            path = self._path(parameter, state, group, int(state[_STEP]) - 1)
            values -= path.travelled(state[_LAST][rows], momentum)
            momentum *= path.kept(state[_LAST][rows], momentum)
            path.advance(rate, float(group["momentum"]))
            state[_LAST][rows] = int(state[_STEP])
        momentum.mul_(group["momentum"]).add_(gradient)
        state[_MOMENTUM].index_copy_(0, rows, momentum)
        parameter.index_copy_(0, rows, values.add_(momentum, alpha=-rate))

    @torch.no_grad()
    def catch_up(self) -> None:
        """Make the missed steps of all rows; called before evaluation and checkpoints."""
        for group in self.param_groups:
            for parameter in group["params"] if group["idle"] == "deferred" else ():
                if state := self.state.get(parameter):
                    self._catch_up(parameter, state, group)

    def _catch_up(self, parameter: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        path = self._path(parameter, state, group, int(state[_STEP]))
        late = (state[_LAST] < int(state[_STEP])).nonzero().flatten()
        late = late[state[_MOMENTUM][late].flatten(1).any(dim=1)] if parameter.ndim > 1 else late
        for rows in late.split(1 << 16):
            last, momentum = state[_LAST][rows], state[_MOMENTUM][rows]
            parameter[rows] -= path.travelled(last, momentum)
            state[_MOMENTUM][rows] = momentum * path.kept(last, momentum)
        state[_LAST].fill_(int(state[_STEP]))

    def _path(
        self, parameter: Tensor, state: dict[str, Any], group: Mapping[str, Any], steps: int
    ) -> _Path:
        """C and G after ``steps`` steps.

        Steps by other processes or before a checkpoint are assumed to have had the present rate and
        momentum.
        """
        path = self._paths.get(parameter)
        if path is None or path.steps > steps:
            path = self._paths[parameter] = _Path()
        for _ in range(steps - path.steps):
            path.advance(float(group["lr"]), float(group["momentum"]))
        return path


class _Path:
    """C and G of the theory of operation, for every step a so far."""

    def __init__(self) -> None:
        self.steps = 0
        self._first = 0  # the first step whose C has not vanished
        self._both = torch.zeros(2, _BEGUN, dtype=torch.float64)  # C and G, by a
        self._both[0, 0] = 1.0

    def advance(self, rate: float, momentum: float) -> None:
        """One more step."""
        self.steps += 1
        if self.steps == self._both.shape[1]:
            self._both = torch.cat([self._both, torch.zeros_like(self._both)], dim=1)
        kept, travelled = self._both[:, self._first : self.steps]
        kept.mul_(momentum)
        travelled.add_(kept, alpha=rate)
        self._both[0, self.steps] = 1.0
        while self._first < self.steps and float(self._both[0, self._first]) < _VANISHED:
            self._first += 1

    def kept(self, last: Tensor, like: Tensor) -> Tensor:
        """C, as a factor of momenta (n, ...) of rows whose last gradients were at ``last`` (n,)."""
        return _beside(self._both[0, last], like)

    def travelled(self, last: Tensor, momentum: Tensor) -> Tensor:
        """The distance that such rows have moved, (n, ...)."""
        return momentum * _beside(self._both[1, last], momentum)


class RowAdam(_RowOptimizer):
    """Adam that moves only rows with a gradient, with a step count per row.

    As ``torch.optim.SparseAdam``, but a row's moments are corrected by the number of its own
    gradients, so its first step is one learning rate long, however late it occurs. A row with a
    gradient in every step moves as under ``torch.optim.Adam``, ``eps`` included.

    Args:
        params: parameters or groups; each at least one-dimensional.
        lr: step size.
        betas: decay of the mean and of the mean square of the gradient.
        eps: added to the root of the corrected mean square.

    Raises:
        UserError: for an option out of its range.
    """

    @typed("")
    def __init__(
        self,
        params: Iterable[Any],
        lr: NotNegative = 0.001,
        betas: tuple[Decay, Decay] = (0.9, 0.999),
        eps: NotNegative = 1e-8,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps})

    def _step_rows(
        self, parameter: Tensor, group: Mapping[str, Any], rows: Tensor, gradient: Tensor
    ) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
            state[_COUNTS] = torch.zeros(len(parameter), dtype=torch.int64)
        counts = state[_COUNTS][rows] + 1
        mean = state["exp_avg"].index_select(0, rows).lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"].index_select(0, rows).mul_(beta2)
        square.addcmul_(gradient, gradient, value=1 - beta2)
        state[_COUNTS][rows] = counts
        state["exp_avg"].index_copy_(0, rows, mean)
        state["exp_avg_sq"].index_copy_(0, rows, square)
        first, second = (_beside(1 - beta ** counts.double(), mean) for beta in (beta1, beta2))
        step = mean.div_(first).div_(square.div_(second).sqrt_().add_(group["eps"]))
        parameter.index_add_(0, rows, step, alpha=-float(group["lr"]))


def _rows_of(parameter: Tensor) -> tuple[Tensor, Tensor]:
    """Row numbers (n,) and values (n, ...) of its gradient.

    Raises:
        UserError: if it has no rows.
    """
    gradient = parameter.grad
    assert gradient is not None, "asked before"
    if parameter.ndim == 0 or (gradient.is_sparse and gradient.sparse_dim() != 1):
        raise UserError(
            f"a parameter of shape {tuple(parameter.shape)} was given to an optimizer that steps "
            "rows; give it embeddings (sparse=True), and the rest to SGD or Adam"
        )
    if not gradient.is_sparse:
        return torch.arange(len(parameter)), gradient
    gradient = gradient.coalesce()
    return gradient.indices()[0], gradient.values()


def _beside(factors: Tensor, like: Tensor) -> Tensor:
    """One factor (n,) for each row (n, ...)."""
    return factors.to(like.dtype).view(-1, *[1] * (like.ndim - 1))
