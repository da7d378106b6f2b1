"""What an optimizer's class tells about its needs, without asking its author."""

from __future__ import annotations

import dis
import inspect
from types import CodeType
from typing import Any

import torch


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the arithmetic is torch's own, perhaps under a user's name."""
    return str(_step(optimizer).__module__).startswith("torch.optim.")


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``step`` has an argument that is not optional."""
    return any(
        argument.default is argument.empty and argument.kind is argument.POSITIONAL_OR_KEYWORD
        for argument in _arguments(optimizer)
    )


def takes_sparse(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it can be given sparse gradients. A user's class is given what autograd makes."""
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
    """Whether a step moves the rows that have a gradient, and no others."""
    return bool(getattr(optimizer, "steps_rows", False))


def puts_off(optimizer: torch.optim.Optimizer) -> bool:
    """Whether rows without a gradient are behind until its ``catch_up`` is called."""
    return callable(getattr(optimizer, "catch_up", None))


def calls_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``step`` may call its closure in the middle, or more than once.

    Torch's optimizers call an optional closure once, before anything else, which is what the
    workers do for them; where it is not optional (L-BFGS) they call it as they please. Of a user's
    class one only knows that it may, if its code mentions the arguments of ``step`` at all; those
    of this package (``steps_rows``) do as torch's.
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
    """Keep its step from asking for CUDA graphs, which would initialise CUDA in this process.

    The parameters lie in host memory. A context would take some hundred megabytes of a GPU, and
    workers of a later run could not be forked any more.
    """
    for name in ("_cuda_graph_capture_health_check", "_accelerator_graph_capture_health_check"):
        vars(optimizer)[name] = _nothing


def _nothing() -> None:
    pass
