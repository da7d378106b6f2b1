"""A step of a worker's own optimizer, as fast as the masters' would be stepped.

Torch steps Adam and SGD on a CPU tensor by tensor unless it is asked for ``fused=True``; the
masters have that engine anyway. So a worker's step has it, too, where the user has not chosen. That
is said for the time of the step alone: whoever looks at the groups or saves them finds what the
user has made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from hybridtrain.updates.kernels.choice import may_be_fused


def step_of(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The class' own ``step``, without the wrapper that runs the hooks of an object's step."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def own_step(optimizer: torch.optim.Optimizer) -> None:
    """One step with the gradients that are there, without hooks."""
    fused = all(_can_be_fused(optimizer, group) for group in optimizer.param_groups)
    with _fused(optimizer.param_groups) if fused else nullcontext():
        step_of(optimizer)(optimizer)


@contextmanager
def _fused(groups: list[dict[str, Any]]) -> Iterator[None]:
    before = [group["fused"] for group in groups]
    for group in groups:
        group["fused"] = True
    try:
        yield
    finally:
        for group, fused in zip(groups, before, strict=True):
            group["fused"] = fused


def _can_be_fused(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether the engine does what torch would do otherwise.

    It relies on things that it never asks: a gradient that lies in another order than its parameter
    would be mixed up, and momentum must have begun for all parameters or for none.
    """
    special = any(group.get(key) for key in ("foreach", "capturable", "differentiable"))
    if special or group.get("fused") is not None or not may_be_fused(type(optimizer), None):
        return False
    begun = set()
    for parameter in group["params"]:
        if (gradient := parameter.grad) is None:
            continue
        known = optimizer.state[parameter].values() if parameter in optimizer.state else ()
        kept = [each for each in known if isinstance(each, torch.Tensor)]
        if not _is_plain(parameter, gradient, kept):
            return False
        begun.add(bool(kept))
    return len(begun) < 2


def _is_plain(
    parameter: torch.nn.Parameter, gradient: torch.Tensor, kept: list[torch.Tensor]
) -> bool:
    if parameter.dtype != torch.float32 or parameter.device.type != "cpu" or gradient.is_sparse:
        return False
    return all(each.is_contiguous() for each in (parameter, gradient, *kept))
