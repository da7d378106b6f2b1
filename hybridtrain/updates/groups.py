"""Parameter groups: hyper-parameters, members, and changes of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

Groups = tuple[dict[str, Any], ...]  # hyper-parameters, group by group
Members = tuple[tuple[int, ...], ...]  # slot numbers, group by group


def plain(optimizer: torch.optim.Optimizer) -> Groups:
    """A snapshot of the hyper-parameters; mutable values are copied."""
    return tuple(
        {key: _kept(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    )


def _kept(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    return list(value) if isinstance(value, list) else value


def members_of(optimizer: torch.optim.Optimizer, numbers: Sequence[int]) -> Members:
    """``numbers`` of all its parameters, split into groups."""
    remaining = iter(numbers)
    return tuple(tuple(next(remaining) for _ in g["params"]) for g in optimizer.param_groups)


def numbers_of(members: Members) -> list[int]:
    """The slot numbers of all groups."""
    return [number for group in members for number in group]


def with_gradients(
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[dict[str, Any], torch.nn.Parameter, torch.Tensor, dict[str, Any]]]:
    """Each group, a parameter of it that has a gradient, the gradient (dense) and the state."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (gradient := parameter.grad) is not None:
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                yield group, parameter, dense, optimizer.state[parameter]


def untouched(groups: Iterable[dict[str, Any]], known: Groups) -> bool:
    """Whether every hyper-parameter is the identical object (copied mutable values never are).

    A quick check before ``differences``.
    """
    for group, old in zip(groups, known, strict=True):
        if len(group) != len(old) + 1:  # the parameters themselves
            return False
        for key, value in old.items():
            if group.get(key) is not value:
                return False
    return True


def differences(before: Groups, after: Groups) -> Groups | None:
    """New values in each group; ``None`` if there are none."""
    found = tuple(
        {k: v for k, v in new.items() if k not in old or not same(old[k], v)}
        for old, new in zip(before, after, strict=True)
    )
    return found if any(found) else None


def same(one: Any, other: Any) -> bool:
    """Equality, also of tensors."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    return bool(one is other or one == other)


@contextmanager
def slowed(groups: Iterable[dict[str, Any]], factor: float) -> Iterator[None]:
    """Multiply every group's learning rate by the factor, inside the context.

    Afterwards each is the object that it was; a change that the optimizer makes inside is kept,
    divided by the factor.
    """
    if factor == 1.0:
        yield
        return
    rates = [(group, group["lr"], group["lr"] * factor) for group in groups]
    for group, _, slow in rates:
        group["lr"] = slow.clone() if isinstance(slow, torch.Tensor) else slow
    try:
        yield
    finally:
        for group, rate, slow in rates:
            now, group["lr"] = group["lr"], rate
            if same(now, slow):
                continue
            if isinstance(rate, torch.Tensor) and isinstance(now, torch.Tensor):
                rate.copy_(now / factor)
            else:
                group["lr"] = now / factor
