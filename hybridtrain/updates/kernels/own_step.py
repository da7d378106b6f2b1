"""A step of a worker's own optimizer, fused where possible.

Torch steps Adam and SGD on a CPU tensor by tensor unless ``fused=True``. The masters use the fused
engine; a worker's step does, too, if the user has not chosen. The option is set only during the
step, so that the parameter groups that the user sees or saves are unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from hybridtrain.updates.kernels.choice import may_be_fused


def step_of(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The class' ``step``, without torch's wrapper that runs step hooks."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def own_step(optimizer: torch.optim.Optimizer) -> None:
    """One step with the present gradients, without hooks."""
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
    """Whether the fused engine gives the same result.

    It does not check that gradients are laid out like their parameters, or that all parameters have
    momentum or none.
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
