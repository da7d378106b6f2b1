"""Copies of plain data: numbers, texts, tensors, arrays, containers and records of these.

A record is an object of a class that the user has written at a module's top level, or a named
tuple. In place of an object that the calling process has, too, stands :class:`Held`, the way to it.
"""

from __future__ import annotations

import datetime
import pickle
import sys
from array import array
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from copy import copy, deepcopy
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from hybridtrain.engine.recording.run_description import is_installed
from hybridtrain.util.generators import GENERATORS
from hybridtrain.util.reachable import is_framework

Way = tuple[Any, ...]  # names and numbers, from a root to an object

_MOST_ITEMS = 100_000  # of one attribute; more is data, not a result
ATOMS = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    PurePath,
    datetime.date,
    datetime.timedelta,
    torch.device,
    torch.dtype,
)
SEQUENCES = (list, tuple, set, frozenset, deque)
DICTS = (dict, OrderedDict, defaultdict, Counter)
BUFFERS = (bytearray, array)
LIGHTNING = ("pytorch_lightning.", "lightning.")  # modules of either package
_GENERATORS = (*GENERATORS, *np.random.BitGenerator.__subclasses__())
_CPU = torch.device("cpu")
_NUMPY = "biufcSUMm"  # kinds of numbers, texts, times


class NotPlain(Exception):
    """It is no plain data."""


@dataclass(frozen=True)
class Held:
    """An object that the calling process has, too."""

    way: Way


Refer = Callable[[Any], Held | None]


def nothing_held(value: Any) -> Held | None:
    """No object is known in the calling process."""
    return None


def class_name(thing: object) -> str:
    """The name of its class, or of a class; spawned workers name a script's module differently."""
    kind = thing if isinstance(thing, type) else type(thing)
    module = "__main__" if kind.__module__ == "__mp_main__" else kind.__module__
    return f"{module}.{kind.__qualname__}"


@cache
def is_users(kind: type) -> bool:
    """Whether it is neither of the standard library nor of an installed package."""
    if kind.__module__ in ("__main__", "__mp_main__"):
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return not is_framework(kind.__module__) and not (file and is_installed(file))


@cache
def _can_be_found(kind: type) -> bool:
    """Whether another process finds the class by its name."""
    try:
        return pickle.loads(pickle.dumps(kind)) is kind
    except Exception:
        return False


def _is_record(value: Any) -> bool:
    kind: type = type(value)
    return is_users(kind) and _can_be_found(kind) and type(kind) is type


def copied(value: Any, refer: Refer = nothing_held) -> Any:
    """A copy, or what stands for it; raises :class:`NotPlain`."""
    return _unless_too_deep(_copy, value, refer)


def content_of(container: Any, refer: Refer) -> Any:
    """The same of a container that is known itself."""
    return _unless_too_deep(_inside, container, refer)


def _unless_too_deep(copy: Callable[..., Any], value: Any, refer: Refer) -> Any:
    try:
        return copy(value, refer, [_MOST_ITEMS])
    except RecursionError:  # it holds itself
        raise NotPlain from None


def attributes_of(values: Iterable[tuple[str, Any]], refer: Refer = nothing_held) -> dict[str, Any]:
    """Copies of those that are plain data."""
    found = {}
    for name, value in values:
        try:
            found[name] = copied(value, refer)
        except NotPlain:
            continue
    return found


def _copy(value: Any, refer: Refer, left: list[int]) -> Any:
    if isinstance(value, Enum) and type(value).__module__.startswith(LIGHTNING):
        return value  # keys of ``Timer``
    numpys = isinstance(value, np.generic | np.ndarray)  # numpy's float64 is a float, too
    if isinstance(value, ATOMS) and not numpys:
        if type(value).__module__.startswith(("builtins", "pathlib", "datetime", "torch")):
            return value
        raise NotPlain
    return refer(value) or _inside(value, refer, left)


def _inside(value: Any, refer: Refer, left: list[int]) -> Any:
    left[0] -= _items(value)
    if left[0] < 0:
        raise NotPlain
    match value:
        case np.generic() | np.ndarray() if value.dtype.kind in _NUMPY:
            return value.copy()
        case np.ndarray() if value.dtype == object:
            return _array_of([_copy(each, refer, left) for each in value.flat], value.shape)
        case bytearray() | array() if type(value) in BUFFERS:
            return copy(value)
        case ChainMap() if type(value) is ChainMap:
            return ChainMap(*(_copy(each, refer, left) for each in value.maps))
        case torch.Tensor() if type(value) is torch.Tensor:
            return value.detach().to("cpu", copy=True)
        case list() | tuple() | set() | frozenset() | deque() if type(value) in SEQUENCES:
            items = [_copy(each, refer, left) for each in value]
            return deque(items, value.maxlen) if isinstance(value, deque) else type(value)(items)
        case dict() if type(value) in DICTS:
            pairs = {_copy(k, refer, left): _copy(v, refer, left) for k, v in value.items()}
            if isinstance(value, defaultdict):
                if value.default_factory not in (None, int, float, list, dict, set):
                    raise NotPlain
                return defaultdict(value.default_factory, pairs)
            return type(value)(pairs)
        case tuple() if hasattr(value, "_fields") and _is_record(value):
            return type(value)(*(_copy(each, refer, left) for each in value))
    if type(value) in _GENERATORS and getattr(value, "device", _CPU) == _CPU:
        return deepcopy(value)
    if hasattr(value, "__dict__") and _is_record(value) and not _is_heavy(value):
        own = {name: _copy(each, refer, left) for name, each in vars(value).items()}
        return _record(type(value), own)
    raise NotPlain


def _array_of(items: list[Any], shape: tuple[int, ...]) -> Any:
    """An array of objects, each of which may be a container."""
    made = np.empty(len(items), dtype=object)
    for number, each in enumerate(items):
        made[number] = each
    return made.reshape(shape)


def _is_heavy(value: Any) -> bool:
    """No record: a layer, data, a container with attributes."""
    data = (torch.nn.Module, torch.utils.data.Dataset, torch.Tensor, np.ndarray)
    return isinstance(value, (*data, dict, list, set, tuple, *BUFFERS, *GENERATORS))


def _items(value: Any) -> int:
    if type(value) is torch.Tensor:
        return value.numel()
    if isinstance(value, np.ndarray):
        return value.size
    return len(value) if isinstance(value, (*SEQUENCES, *BUFFERS, dict)) else 0


def resolved(value: Any, at: Callable[[Way], Any]) -> Any:
    """The value with the objects themselves; ``at`` raises ``LookupError`` if one is not there."""
    match value:
        case Held():
            return at(value.way)
        case deque():
            return deque((resolved(each, at) for each in value), value.maxlen)
        case np.ndarray() if value.dtype == object:
            return _array_of([resolved(each, at) for each in value.flat], value.shape)
        case ChainMap() if type(value) is ChainMap:
            return ChainMap(*(resolved(each, at) for each in value.maps))
        case tuple() if hasattr(value, "_fields"):
            return type(value)(*(resolved(each, at) for each in value))
        case list() | tuple() | set() | frozenset():
            return type(value)([resolved(each, at) for each in value])
        case dict():
            pairs = {resolved(k, at): resolved(v, at) for k, v in value.items()}
            if isinstance(value, defaultdict):
                return defaultdict(value.default_factory, pairs)
            return type(value)(pairs)
    kind: type = type(value)
    if is_users(kind) and hasattr(value, "__dict__"):
        return _record(kind, {name: resolved(each, at) for name, each in vars(value).items()})
    return value


def _record(kind: type, attributes: dict[str, Any]) -> Any:
    record: Any = object.__new__(kind)
    vars(record).update(attributes)
    return record
