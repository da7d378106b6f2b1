"""Copies of plain data: numbers, texts, tensors, arrays, and containers of these.

In place of an object that the calling process has, too, stands a :class:`Held`: the way to it.
"""

from __future__ import annotations

import datetime
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

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
LIGHTNING = ("pytorch_lightning.", "lightning.")  # modules of either package
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


def copied(value: Any, refer: Refer = nothing_held) -> Any:
    """A copy, or what stands for it; raises :class:`NotPlain`."""
    return _copy(value, refer, [_MOST_ITEMS])


def content_of(container: Any, refer: Refer) -> Any:
    """The same of a container that is known itself."""
    return _inside(container, refer, [_MOST_ITEMS])


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
    raise NotPlain


def _items(value: Any) -> int:
    if type(value) is torch.Tensor:
        return value.numel()
    if isinstance(value, np.ndarray):
        return value.size
    return len(value) if isinstance(value, (*SEQUENCES, dict)) else 0


def resolved(value: Any, at: Callable[[Way], Any]) -> Any:
    """The value with the objects themselves; ``at`` raises ``LookupError`` if one is not there."""
    match value:
        case Held():
            return at(value.way)
        case deque():
            return deque((resolved(each, at) for each in value), value.maxlen)
        case list() | tuple() | set() | frozenset():
            return type(value)([resolved(each, at) for each in value])
        case dict():
            pairs = {resolved(k, at): resolved(v, at) for k, v in value.items()}
            if isinstance(value, defaultdict):
                return defaultdict(value.default_factory, pairs)
            return type(value)(pairs)
    return value
