"""The contract of a merge rule: how the gradients of an update's workers become one.

Without a rule it is their mean, weighted by samples. A rule sees each worker's gradients apart, so
it can take a coordinate-wise median, or leave out a worker whose gradients are far from the others.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch

from hybridtrain.errors import UserError


@dataclass(frozen=True, slots=True)
class WorkerGradients:
    """One worker's part of an update.

    Args:
        worker: its number.
        weight: its share of the update's samples, in (0, 1].
        staleness: updates made since the worker read the parameters.
        gradients: one for each parameter of the optimizer, group by group, in the parameter's shape
            and dtype; ``None``: this worker has none. They may be overwritten.
    """

    worker: int
    weight: float
    staleness: int
    gradients: Sequence[torch.Tensor | None]


@runtime_checkable
class MergeRule(Protocol):
    """Merges the gradients of the workers of one update; the optimizer then steps with the result.

    ``least``: with fewer workers a run does not begin, or ends. An epoch's last update may have
    fewer contributions than workers: if they are fewer than ``least``, their mean is taken.
    """

    least: ClassVar[int]

    def merge(self, parts: Sequence[WorkerGradients]) -> Sequence[torch.Tensor | None]:
        """One gradient for each parameter, in its shape; ``None``: the parameter stays as it is."""
        ...


def by_parameter(
    parts: Sequence[WorkerGradients], merge: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor | None]:
    """Merge each parameter by itself: ``merge`` gets the gradients of the workers that have one,
    (W, *shape); a parameter without any stays as it is.
    """
    columns = zip(*(part.gradients for part in parts), strict=True)
    present = ([each for each in column if each is not None] for column in columns)
    return [merge(torch.stack(each)) if each else None for each in present]


def merged(
    rule: MergeRule, parts: Sequence[WorkerGradients], parameters: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Apply the rule; returns one gradient for each of the ``parameters``.

    Raises:
        UserError: if it returns anything else than gradients in the parameters' shapes.
    """
    name = type(rule).__name__
    if len(parts) < rule.least:
        warnings.warn(
            f"update={name} merges at least {rule.least} contributions; an update at the end of an "
            f"epoch has {len(parts)}, and is their mean",
            stacklevel=2,
        )
        return [_mean(each, parts) for each in zip(*(p.gradients for p in parts), strict=True)]
    made = list(rule.merge(parts))
    if len(made) != len(parameters):
        raise UserError(
            f"update={name}: merge() returned {len(made)} gradients for {len(parameters)} "
            "parameters; return one for each, or None where the parameter is to stay as it is"
        )
    for number, (gradient, parameter) in enumerate(zip(made, parameters, strict=True)):
        if gradient is not None and getattr(gradient, "shape", None) != parameter.shape:
            got = getattr(gradient, "shape", type(gradient).__name__)
            raise UserError(
                f"update={name}: merge() returned {got} for parameter {number}, which has shape "
                f"{tuple(parameter.shape)}; return a tensor of that shape, or None"
            )
    return made


def _mean(
    gradients: Sequence[torch.Tensor | None], parts: Sequence[WorkerGradients]
) -> torch.Tensor | None:
    """Of one parameter, weighted by samples, as without a rule."""
    each = [g * part.weight for g, part in zip(gradients, parts, strict=True) if g is not None]
    return torch.stack(each).sum(0) if each else None


def check_rule(rule: MergeRule, policy: object, gathers: int, holds: bool) -> None:
    """See that updates have separate contributions, and enough of them.

    Args:
        policy: for the message.
        gathers: contributions that make an update, as a rule.
        holds: whether the policy puts contributions aside, as one sum.

    Raises:
        UserError: if not.
    """
    name = type(rule).__name__
    if holds:
        raise UserError(
            f"update={name} was given with policy={policy}, which puts contributions aside as one "
            "sum, and the rule merges separate ones; use policy=hybrid or backup"
        )
    if gathers < rule.least:
        raise UserError(
            f"update={name} was given with policy={policy}, where {gathers} contributions make an "
            f"update, but it merges at least {rule.least}; use policy=hybrid with at least "
            f"{rule.least} workers, or update=user"
        )
