"""Parameter groups: hyper-parameters, members, and changes of them."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, NoneType
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


def merged(before: Groups | None, after: Groups) -> Groups:
    """Earlier changes, and those after them."""
    if before is None:
        return after
    return tuple({**old, **new} for old, new in zip(before, after, strict=True))


def in_words(groups: Groups) -> str:
    """Equal where hyper-parameters are, in every process."""
    return repr([sorted((k, _word(value)) for k, value in group.items()) for group in groups])


def _word(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return repr(value.tolist())
    if isinstance(value, tuple | list):
        return repr([*map(_word, value)])
    return repr(value) if isinstance(value, _WORDS) else type(value).__name__


_WORDS = (bool, int, float, str, NoneType)


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


# ---- properties of optimizer classes, found by inspection ---------------------------------------


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
