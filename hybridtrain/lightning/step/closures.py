"""Closures of ``optimizer.step``, as users and Lightning make them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from pytorch_lightning.core.optimizer import do_nothing_closure

Closure = Callable[[], Any]


def is_empty(closure: Closure) -> bool:
    """Whether it is what Lightning gives where the user has given none."""
    while isinstance(closure, partial):  # how precision plugins wrap it: the last argument
        closure = closure.args[-1]
    return closure is do_nothing_closure


def run(closure: Closure) -> Any:
    """With gradients, wherever it is called from."""
    with torch.enable_grad():
        return closure()


def as_float(loss: Any) -> float | None:
    """A loss as a number, if it is one."""
    if isinstance(loss, torch.Tensor):
        return float(loss.detach()) if loss.numel() == 1 else None
    return float(loss) if isinstance(loss, int | float) else None
