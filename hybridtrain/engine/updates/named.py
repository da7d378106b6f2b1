"""Updates by name: optimizers of the masters other than the module's own."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import torch

from hybridtrain.engine.exchanges import Exchange, evaluates
from hybridtrain.engine.exchanges.exchange import MergeRule, WorkerGradients, by_parameter
from hybridtrain.engine.updates.delay_tolerant import AdaDelay, AdaptiveRevision, AsyncAdaDA
from hybridtrain.engine.updates.groups import Groups, evaluated, with_gradients
from hybridtrain.engine.updates.searches import LBFGS, GradientDescent, Searches
from hybridtrain.errors import UserError
from hybridtrain.util.option_types import (
    Checked,
    Decay,
    NotNegative,
    Positive,
    Range,
    Share,
    as_typed,
    checked_choice,
    choose,
    hint,
    is_target,
    shown,
    typed,
)
from hybridtrain.util.own_parts import TARGET, is_class, load_target, make_part

# ---- merge rules that bear workers whose gradients are garbage ----------------------------------
# Yin, Chen, Ramchandran, Bartlett, *Byzantine-Robust Distributed Learning: Towards Optimal
# Statistical Rates*, ICML 2018 (arXiv:1803.01498), definitions 1 and 2. Workers count alike,
# however many samples they have, as the paper's do.


@dataclass(frozen=True)
class Median:
    """The coordinate-wise median: of an even number of workers, the mean of the middle two."""

    least: ClassVar[int] = 3

    def merge(self, parts: Sequence[WorkerGradients]) -> list[torch.Tensor | None]:
        """It bears garbage of less than half of the workers."""
        return by_parameter(parts, lambda stack: _middle(stack, (len(stack) - 1) // 2))


@dataclass(frozen=True)
class TrimmedMean(Checked):
    """The coordinate-wise mean without the ``trim`` share of the largest and of the smallest.

    Args:
        trim: β, the share of the workers that is left out at each end; of fewer workers than
            1 / β, one at each end.
    """

    prefix: ClassVar[str] = "update."
    least: ClassVar[int] = 3
    trim: Annotated[float, Range(0, 0.5, "()")] = 0.2

    def merge(self, parts: Sequence[WorkerGradients]) -> list[torch.Tensor | None]:
        """It bears garbage of as many workers as it leaves out at one end."""

        def mean(stack: torch.Tensor) -> torch.Tensor:
            most = (len(stack) - 1) // 2
            return _middle(stack, min(max(1, int(self.trim * len(stack))), most))

        return by_parameter(parts, mean)


def _middle(stack: torch.Tensor, trim: int) -> torch.Tensor:
    """(W, *shape), sorted by worker in each place; the mean without ``trim`` at each end."""
    return stack.sort(0).values[trim : len(stack) - trim].mean(0)


MERGE_RULES: dict[str, Callable[..., MergeRule]] = {
    "median": Median,
    "trimmed_mean": TrimmedMean,
}


# ---- outer optimizers of local SGD that PyTorch does not have -----------------------------------
# They step the masters with pseudo-gradients (movements or elastic forces), not with gradients.


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
        lr: ε, the learning rate.
        momentum: β, its decay.
        buffer: N, as a rule the number of workers.
        activation: c, the share of the momentum in each movement, from 0 to 1 / N.

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


UpdateSpec = str | Mapping[str, Any] | MergeRule | None  # a name, {"name": ..., arguments}, a rule

USER, MEAN, SUM = "user", "mean", "sum"
_SUBTRACT: dict[str, type[torch.optim.SGD]] = {MEAN: torch.optim.SGD, SUM: Sum}


def _evaluates_once(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether its step needs no closure: the masters' optimizer has no loss to evaluate."""
    return inspect.signature(inspect.unwrap(kind.step)).parameters["closure"].default is None


OURS: dict[str, type[torch.optim.Optimizer]] = {
    "adaptive_revision": AdaptiveRevision,
    "async_ada_da": AsyncAdaDA,
    "adadelay": AdaDelay,
    "delayed_nesterov": DelayedNesterov,
    "lbfgs": LBFGS,
    "gradient_descent": GradientDescent,
}
KNOWN: dict[str, type[torch.optim.Optimizer]] = OURS | {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
    and _evaluates_once(kind)
}


@dataclass(frozen=True)
class NamedUpdate:
    """The optimizer of the masters.

    ``"user"``: the module's own; ``"mean"`` or ``"sum"``: subtracts the mean or sum of the
    contributions; or an optimizer of ``torch.optim``,
    :mod:`hybridtrain.engine.updates.delay_tolerant` or this module, with its arguments.

    With a ``merge`` rule, it makes one gradient of the workers', in place of their mean, and the
    module's own optimizer steps.

    With ``inherits``, hyper-parameters that are not given follow those of the module's own
    optimizer (the learning rate and its schedule).
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    inherits: bool = True
    merge: MergeRule | None = None

    @property
    def is_users(self) -> bool:
        """Whether it is the module's own optimizer."""
        return self.name == USER

    @property
    def _kind(self) -> type[torch.optim.Optimizer]:
        return _SUBTRACT.get(self.name) or KNOWN[self.name]

    def _follows(self, optimizer: torch.optim.Optimizer) -> frozenset[str]:
        """The hyper-parameters that follow those of the module's own optimizer."""
        if self.name in _SUBTRACT or not self.inherits:
            return frozenset()
        return frozenset(inspect.signature(self._kind).parameters) & (
            optimizer.defaults.keys() - self.options.keys()
        )

    def told(self, optimizer: torch.optim.Optimizer, changed: Groups | None) -> Groups | None:
        """The changed hyper-parameters of the module's own optimizer that the masters' follows."""
        if changed is None or self.is_users:
            return changed
        follows = self._follows(optimizer)
        told = tuple({k: v for k, v in group.items() if k in follows} for group in changed)
        return told if any(told) else None

    def over(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The masters' optimizer for the parameters of one of the module's optimizers.

        Raises:
            UserError: if the class refuses its arguments.
        """
        if self.is_users:
            return optimizer
        follows = self._follows(optimizer)
        groups = [
            {"params": group["params"], **{key: group[key] for key in follows if key in group}}
            for group in optimizer.param_groups
        ]
        options = {"lr": 1.0} if self.name in _SUBTRACT else dict(self.options)
        try:
            return self._kind(groups, **options)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"update={self.name} with {dict(self.options)} was given, but "
                f"{self._kind.__name__} refuses that: {error}"
            ) from error

    def beside(self, optimizer: torch.optim.Optimizer, own: bool) -> torch.optim.Optimizer:
        """The masters' optimizer; ``own``: workers step the user's optimizer themselves."""
        made = self.over(optimizer)
        if made is optimizer and own:  # another one of its kind
            made = copy(optimizer)
            made.state = defaultdict(dict)
        return made


def update_of(exchange: Exchange, given: UpdateSpec | NamedUpdate = None) -> NamedUpdate:
    """The update that the user has chosen, or else the exchange's default.

    Where workers step optimizers of their own, the masters' inherits no hyper-parameters.

    Raises:
        UserError: if there is no such name or argument, or it does not fit the exchange.
    """
    made = given if isinstance(given, NamedUpdate) else make_update(given)
    made = made or make_update(exchange.update)
    assert made is not None, "an exchange has one"
    given = f"update={made.name} was given with exchange={as_typed(exchange)}"
    if made.merge is not None and exchange.parameters != "read":
        raise UserError(
            f"update={as_typed(made.merge)} was given with exchange={as_typed(exchange)}, but it "
            "merges gradients, and there workers hand none over; use exchange=gradient, or leave "
            "it out"
        )
    if exchange.parameters == "shared" and not made.is_users:
        raise UserError(
            f"{given}, but there workers step the parameters with the module's own optimizer; "
            "leave it out, or use policy=async"
        )
    _check_evaluations(exchange, made, given)
    return replace(made, inherits=exchange.parameters != "own")


def _check_evaluations(exchange: Exchange, made: NamedUpdate, given: str) -> None:
    """A line search takes evaluations of the whole loss, and nothing else can use them well."""
    searches = issubclass(KNOWN.get(made.name, torch.optim.SGD), Searches)
    if searches and not evaluates(exchange):
        raise UserError(
            f"{given}, but it evaluates the loss several times in a step, and there is nothing to "
            "evaluate where what was handed over is applied; use strategy=sandblaster, or let the "
            "module's own optimizer be LBFGS, with strategy=hybrid and exchange=gradient"
        )
    if evaluates(exchange) and not searches:
        raise UserError(
            f"{given}, where an epoch is one evaluation of the whole loss, and {made.name} would "
            "make one step with it; use update=lbfgs or gradient_descent, or train on "
            "mini-batches with strategy=hybrid"
        )


def make_update(given: UpdateSpec) -> NamedUpdate | None:
    """An update from its name, its name and arguments, a merge rule, or the ``_target_`` of one;
    ``None``: the exchange's default.

    Raises:
        UserError: if there is no such name or argument.
    """
    if given is None:
        return None
    if isinstance(given, type):
        raise is_class("update", given)
    if is_target(given):
        refuse_optimizer(str(given[TARGET]))
        given = make_part("update", given)
    if not isinstance(given, str | Mapping):
        return NamedUpdate(USER, merge=_checked_rule(given))
    options = {"name": given} if isinstance(given, str) else {str(k): v for k, v in given.items()}
    name = str(options.pop("name", None)).lower()
    if name in MERGE_RULES:
        return NamedUpdate(USER, merge=choose("update", given, MERGE_RULES, MergeRule))  # type: ignore[type-abstract]
    known = {USER, *_SUBTRACT, *MERGE_RULES, *KNOWN}
    if name not in known:
        raise UserError(
            f"update={shown(given)} was given{hint(name, known)}; known are {USER} (the module's "
            f"own optimizer), {', '.join([*_SUBTRACT, *MERGE_RULES, *OURS])}, and of torch.optim "
            f"{', '.join(sorted(KNOWN.keys() - OURS))}"
        )
    checked_choice("update", {"name": name, **options}, {name: KNOWN.get(name, lambda: None)})
    return NamedUpdate(name, options)


def refuse_optimizer(target: str) -> None:
    """Refuse a class of optimizers as ``_target_`` of an update; raises UserError."""
    kind = load_target("update", target)
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
        raise UserError(
            f"update={target} was given, which is a class of optimizers, and an update takes one "
            "of torch.optim by its name ({name: sgd, lr: 0.7}), or a merge rule; return an "
            "optimizer of your own from configure_optimizers: with strategy=hybrid it steps the "
            "parameters in host memory"
        )


def _checked_rule(given: object) -> MergeRule:
    if isinstance(given, MergeRule):
        return given
    raise UserError(
        f"update={shown(given)} was given, which is neither a name nor a merge rule; a rule has "
        "merge(parts), which returns one gradient for each parameter, and the least number of "
        "contributions that it merges (hybridtrain.engine.exchanges.MergeRule)"
    )
