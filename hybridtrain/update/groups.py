"""Parameter groups: their hyper-parameters, who belongs to them, and what has changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Groups = tuple[dict[str, Any], ...]  # hyper-parameters, group by group
Members = tuple[tuple[int, ...], ...]  # slot numbers, group by group


def plain(optimizer: torch.optim.Optimizer) -> Groups:
    """The hyper-parameters as they are now: what may change in place is copied."""
    return tuple(
        {key: _kept(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    )


def _kept(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    return list(value) if isinstance(value, list) else value


def members_of(optimizer: torch.optim.Optimizer, numbers: Sequence[int]) -> Members:
    """``numbers`` of all its parameters, one behind the other, cut into groups."""
    remaining = iter(numbers)
    return tuple(tuple(next(remaining) for _ in g["params"]) for g in optimizer.param_groups)


def differences(before: Groups, after: Groups) -> Groups | None:
    """What is new in each group; ``None`` where nothing is in any."""
    found = tuple(
        {k: v for k, v in new.items() if k not in old or not same(old[k], v)}
        for old, new in zip(before, after, strict=True)
    )
    return found if any(found) else None


def same(one: Any, other: Any) -> bool:
    """Equality that tensors understand, too."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    return bool(one is other or one == other)
