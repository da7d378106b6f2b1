"""Whether objects lead to one of some others: whether a data set holds the module that is trained.

Of a module, its parts are sought: modules, parameters, buffers, and tensors in the same memory.

Everything is looked at that Python shows: attributes and slots, elements, what functions were made
with. Samples may be many, so lists of them are gone through by kind: where all elements, and all
that they consist of, are plain data, none of them is looked at on its own. What is left is looked
at one by one, up to a limit; behind it, the answer is that it may.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from pytorch_lightning import Trainer

from hybridtrain.util.code_reading import filled_cells

_MOST = 50_000  # objects to look at one by one, in about 0.1 s
_MANY = 100  # in one container: gone through by kind
_MOST_BY_KIND = 30_000_000  # in about a second
_LAYERS = 6  # of containers and samples in one another, to go through by kind
_PLAIN = (bool, int, float, complex, str, bytes, type, type(None), torch.Tensor, ModuleType)
_SERIES = (list, tuple, set, frozenset, deque)
# To be looked at one by one.
_OPAQUE = (FunctionType, MethodType, partial, torch.nn.Module, torch.nn.Parameter)


def may_hold(sources: Iterable[object], module: torch.nn.Module) -> bool:
    """Whether one of these objects leads to a part of the module, or whether nobody can tell."""
    tensors = [*module.parameters(), *module.buffers()]
    sought, memory = set(map(id, (*module.modules(), *tensors))), set(map(_place, tensors)) - {0}
    queue = deque(sources)
    seen: dict[int, object] = {}  # and kept, or another object could get the number of one
    n_by_kind = 0
    while queue:
        each = queue.popleft()
        if id(each) in sought or (isinstance(each, torch.Tensor) and _place(each) in memory):
            return True
        if id(each) in seen:
            continue
        seen[id(each)] = each
        parts = list(_parts(each))
        if len(parts) > _MANY:
            plain, n_seen = _is_plain(parts)
            n_by_kind += n_seen
            parts = [] if plain else parts
        if len(seen) > _MOST or n_by_kind > _MOST_BY_KIND:
            return True
        few = len(parts) <= _MANY
        queue.extend(p for p in parts if _is_sought(type(p), few))
    return False


def _is_sought(kind: type, few: bool) -> bool:
    """Whether to look at an object of this kind; at tensors only where there are ``few``."""
    return (few and issubclass(kind, torch.Tensor)) or not _leads_elsewhere(kind)


def _place(tensor: torch.Tensor) -> int:
    """Where its memory begins; 0 if it has none of its own (sparse, not materialized)."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return 0


def _leads_elsewhere(kind: type) -> bool:
    """To no module, or to every one: a data module knows its trainer, our samplers the strategy."""
    own = kind.__module__.startswith("hybridtrain.lightning.")
    plain = issubclass(kind, (*_PLAIN, Trainer)) and not issubclass(kind, torch.nn.Parameter)
    return own or plain


def _parts(value: Any) -> Iterable[object]:
    """What an object holds."""
    match value:
        case FunctionType():
            named = map(value.__globals__.get, value.__code__.co_names)
            modules = (each for each in named if isinstance(each, torch.nn.Module))
            return (*filled_cells(value), *(value.__defaults__ or ()), *modules)
        case MethodType():
            return (value.__self__, value.__func__)
        case partial():
            return (value.func, *value.args, *value.keywords.values())
    return elements_of(value)


def elements_of(value: Any) -> Iterator[object]:
    """Of a container, and the attributes of any object."""
    yield from getattr(value, "__dict__", {}).values()
    for name in _slots(type(value)):
        yield getattr(value, name, None)
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, _SERIES):
        yield from value


def _slots(kind: type) -> Iterator[str]:
    for each in kind.__mro__:
        slots = vars(each).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            yield f"_{each.__name__.lstrip('_')}{name}" if private else name


def _is_plain(values: list[Any]) -> tuple[bool, int]:
    """Whether these are plain data all through, and how many were looked at, of a few kinds."""
    n_seen = 0
    for _ in range(_LAYERS):
        n_seen += len(values)
        kinds = {kind for kind in set(map(type, values)) if not _leads_elsewhere(kind)}
        if not kinds or n_seen > _MOST_BY_KIND:
            return not kinds, n_seen
        if any(issubclass(kind, _OPAQUE) for kind in kinds):
            break
        values = list(chain.from_iterable(_all_elements(values, kind) for kind in kinds))
    return False, n_seen


def _all_elements(values: list[Any], kind: Any) -> Iterable[object]:
    """What those of this kind hold, all in one."""
    mine: list[Any] = [value for value in values if type(value) is kind]
    if kind is not tuple:  # samples may all know the data set, which knows them all
        mine = list({id(value): value for value in mine}.values())
    if kind in _SERIES:
        return chain.from_iterable(mine)
    if kind is dict:
        return chain.from_iterable(map(dict.values, mine))
    return chain.from_iterable(map(elements_of, mine))
