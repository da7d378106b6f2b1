"""Properties of optimizer classes, found by inspection."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``step`` is torch's, perhaps in a user's subclass."""
    return str(_step(optimizer).__module__).startswith("torch.optim.")


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``step`` has a required argument."""
    return any(
        argument.default is argument.empty and argument.kind is argument.POSITIONAL_OR_KEYWORD
        for argument in _arguments(optimizer)
    )


def takes_sparse(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it accepts sparse gradients; assumed of a user's class."""
    if not is_torchs(optimizer):
        return True
    kind = str(_step(optimizer).__qualname__).split(".")[0]
    return kind == "SparseAdam" or (
        kind in ("SGD", "Adagrad")
        and not any(
            group.get("weight_decay") or group.get("fused") or group.get("differentiable")
            for group in optimizer.param_groups
        )
    )


def steps_rows(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step moves only the rows that have a gradient."""
    return bool(getattr(optimizer, "steps_rows", False))


def puts_off(optimizer: torch.optim.Optimizer) -> bool:
    """Whether rows without a gradient are stepped later, by its ``catch_up``."""
    return callable(getattr(optimizer, "catch_up", None))


def calls_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``step`` may call its closure in the middle, or more than once.

    Torch's optimizers call an optional closure once, first, as the workers do; with a required
    closure (L-BFGS) at any time. A user's class may, if its code reads the arguments of ``step``;
    those of this package (``steps_rows``) do not.
    """
    if needs_closure(optimizer):
        return True
    if steps_rows(optimizer):
        return False
    code = getattr(_step(optimizer), "__code__", None)
    if is_torchs(optimizer) or not isinstance(code, CodeType):
        return False
    return bool({argument.name for argument in _arguments(optimizer)} & _loaded(code))


def _arguments(optimizer: torch.optim.Optimizer) -> list[inspect.Parameter]:
    return list(inspect.signature(_step(optimizer)).parameters.values())[1:]


def _step(optimizer: torch.optim.Optimizer) -> Any:
    return inspect.unwrap(type(optimizer).step)


def _loaded(code: CodeType) -> set[str]:
    """The names of the local variables that the code reads."""
    found: set[str] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith("LOAD_"):
            names = instruction.argval  # Python 3.13 loads two at once
            found |= set(names) if isinstance(names, tuple) else {str(names)}
    return found


def look_for_no_device(optimizer: torch.optim.Optimizer) -> None:
    """Disable its check for CUDA graphs, which would initialise CUDA in this process.

    The parameters are in host memory. A context would take some hundred megabytes of a GPU, and
    workers of a later run could not be forked any more.
    """
    for name in ("_cuda_graph_capture_health_check", "_accelerator_graph_capture_health_check"):
        vars(optimizer)[name] = _nothing


def _nothing() -> None:
    pass


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """The loss of an optional closure, which an optimizer calls before its step."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
