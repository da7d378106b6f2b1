"""Check the sizes of a checkpoint's tensors before any of them is copied.

A tensor is a view of a storage: its strides may let a few bytes stand for any number of elements,
and many tensors may share a storage. Loading costs no memory then; the first copy costs all of it.
So all views together may have a few times as many bytes as the storages. What an elementwise
optimizer keeps of a parameter must be a number or of the parameter's shape; other optimizers keep
factors, history or blocks of any shape, which the first rule bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

import torch
from torch import Tensor

from hybridtrain.errors import UserError

_TIMES, _SPARE_BYTES = 8, 2**20  # a file whose weights are tied holds them once
_MOST_CONTAINERS, _DEEPEST = 2**20, 100  # a container that is in many others counts each time
_ELEMENTWISE = frozenset(
    ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop")
) | {"ASGD", "SparseAdam", "Muon"}
_NESTED = (Mapping, list, tuple, set)
Place = tuple[Any, ...]  # the place of the container, and the key in it


def check_sizes(content: Any, source: str, file_bytes: float = math.inf) -> None:
    """Refuse tensors that take much more memory than the file has content for.

    Args:
        content: of the checkpoint.
        source: the user's argument, for the error: ``ckpt=last.ckpt``.
        file_bytes: size of the file, where it is known: other storages count for nothing.

    Raises:
        UserError: naming the largest of them.
    """
    held: dict[int, int] = {}  # bytes of each storage
    seen: set[object] = set()  # views; tied weights are one
    wanted = largest = 0
    where: tuple[Place, Tensor] | None = None
    for place, tensor, is_moment in _tensors(content, source):
        for part in _parts(tensor):
            storage, n_bytes = part.untyped_storage(), part.numel() * part.element_size()
            if part.device.type != "meta":
                held[storage.data_ptr()] = storage.nbytes()
            view = (storage.data_ptr(), part.storage_offset(), part.shape, part.stride())
            if is_moment or view not in seen:  # moments are not tied
                seen.add(view)
                wanted += n_bytes
            if where is None or n_bytes > largest:
                largest, where = n_bytes, (place, tensor)
    known = min(sum(held.values()), file_bytes)
    if where is not None and wanted > _TIMES * known + _SPARE_BYTES:
        place, tensor = where
        raise UserError(
            f"{source}: the file was changed or is damaged: {_path(place)} is a tensor of shape "
            f"{tuple(tensor.shape)}, which takes {_in_words(largest)}, all tensors together "
            f"{_in_words(wanted)}, and the file holds {_in_words(known)} of them"
        )


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """The dense tensors that a tensor is made of."""
    if tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    elif tensor.layout is torch.strided and not tensor.is_nested:
        yield tensor


def _tensors(content: Any, source: str) -> Iterator[tuple[Place, Tensor, bool]]:
    """All tensors in containers, their places, and whether they are of an optimizer.

    Raises:
        UserError: if containers are nested as those of no checkpoint.
    """
    left: list[tuple[Place, Any, int, bool]] = [(("checkpoint",), content, 0, False)]
    for n_containers in count():
        while left and isinstance(left[-1][1], Tensor):
            place, tensor, _, is_moment = left.pop()
            yield place, tensor, is_moment
        if not left:
            return
        place, value, depth, is_moment = left.pop()
        if n_containers > _MOST_CONTAINERS or depth > _DEEPEST:
            raise UserError(
                f"{source}: the file was changed or is damaged: {_path(place)[:80]} is nested more "
                f"than {_DEEPEST} times, or has more than {_MOST_CONTAINERS:,} parts"
            )
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            if isinstance(each, (Tensor, *_NESTED)):
                of_optimizer = is_moment or (depth == 0 and key == "optimizer_states")
                left.append(((place, key), each, depth + 1, of_optimizer))


def _path(place: Place) -> str:
    """The place in words: ``checkpoint.optimizer_states.0.state.3.exp_avg``."""
    parts = []
    while len(place) == 2:
        place, key = place
        parts.append(str(key)[:80])
    return ".".join([*place, *reversed(parts)])


def _in_words(n_bytes: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n_bytes >= size:
            return f"{n_bytes / size:,.1f} {unit}"
    return f"{n_bytes:,} bytes"


# ---- shapes, where the optimizers are known ------------------------------------------------------


def check_shapes(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], source: str) -> None:
    """Refuse a state whose tensors do not have the shapes that the optimizer gives them.

    Args:
        optimizer: as the module has made it; one of the user's own keeps what it likes.
        state: of the checkpoint, as ``state_dict`` has it.
        source: the user's argument, for the error.

    Raises:
        UserError: naming the entry, its shape and the allowed ones.
    """
    made = _parameters(optimizer)
    groups = state.get("param_groups") or [{"params": range(len(made))}]
    numbers = [number for group in groups for number in group["params"]]
    for number, parameter in zip(numbers, made, strict=False):
        allowed = _shapes(optimizer, parameter)
        own = state.get("state", {}).get(number)
        for name, value in own.items() if allowed and isinstance(own, Mapping) else ():
            for each in value if isinstance(value, list | tuple) else (value,):
                _check(each, allowed, f"{source}: {name} of the optimizer's parameter {number}")


def check_worker(optimizer: torch.optim.Optimizer, own: Mapping[str, Any], source: str) -> None:
    """The same of what a worker has kept for itself. Raises UserError."""
    check_shapes(optimizer, own, source)
    made, exchange = _parameters(optimizer), own.get("exchange", {})  # none within a whole pass
    for number, parameter in enumerate(made):
        place = f"of a worker's parameter {number}"
        kept = [x for x in (own.get("parameters"), *exchange.values()) if _is_one_each(x)]
        for each in [x for x in kept if x]:
            value = each[number] if len(each) == len(made) else None
            _check(value, [parameter.shape], f"{source}: the value {place}")
        left = exchange.get("residuals", {}).get(number)
        _check(left, [torch.Size((parameter.numel(),))], f"{source}: the residual {place}")


def _is_one_each(value: Any) -> bool:
    """Whether it is a list of tensors, one for each parameter."""
    return isinstance(value, list) and all(isinstance(each, Tensor) for each in value)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _check(value: Any, allowed: list[torch.Size], what: str) -> None:
    if isinstance(value, Tensor) and value.dim() and value.shape not in allowed:
        raise UserError(
            f"{what} has shape {tuple(value.shape)} in the checkpoint, and here "
            f"{' or '.join(str(tuple(x)) for x in allowed)}; give a checkpoint of this module and "
            "optimizer"
        )


def _shapes(optimizer: torch.optim.Optimizer, parameter: Tensor) -> list[torch.Size]:
    """The shapes of what the optimizer keeps of a parameter, besides numbers; empty: any."""
    kind, shape = type(optimizer), parameter.shape
    is_torchs = kind is getattr(torch.optim, kind.__name__, None)
    if is_torchs and kind.__name__ in _ELEMENTWISE:
        return [shape]
    if is_torchs and kind.__name__ == "Adafactor":
        factors = [torch.Size((*shape[:-1], 1)), torch.Size((*shape[:-2], 1, *shape[-1:]))]
        return [shape, *(factors if parameter.dim() > 1 else ())]
    if isinstance(optimizer, torch.optim.LBFGS):
        return [torch.Size((sum(each.numel() for each in _parameters(optimizer)),))]
    if kind.__module__.startswith("hybridtrain.engine.updates."):
        return [shape, shape[:1]]  # a count for each row
    return []
