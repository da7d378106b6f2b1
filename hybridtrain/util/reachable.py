"""Walks through what can be reached from some objects, within a bound.

Theory of operation. The walk goes breadth first, so that what lies near the given objects is found
whatever lies below. It looks at the first elements of a long container only, and ends after a fixed
number of objects: a data set of a million objects costs milliseconds. It goes through containers,
attributes, closures and defaults, and through the globals that functions of user code name. It runs
no user code: no property, no ``__getattr__``, no iteration over anything but plain containers.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    TracebackType,
    WrapperDescriptorType,
)
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import ReferenceType

import numpy as np
import torch

_MOST = 8_000  # objects of a walk
_MOST_OF_ONE, _MOST_ATTRIBUTES = 48, 500  # elements of a container, attributes of an object

Link = tuple[Any, str, Any]  # that of the object above it, the kind of step, its name
Step = tuple[str, Any, Any]  # the kind of step, its name, the object

_LEAVES = frozenset({
    *(int, float, complex, bool, str, bytes, bytearray, memoryview, range, slice, type(None)),
    *(CodeType, FrameType, GetSetDescriptorType, MappingProxyType),
    *(MemberDescriptorType, ModuleType, TracebackType, WrapperDescriptorType, ReferenceType),
    *(torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device, torch.Size, np.dtype),
})  # fmt: skip
_STANDARD = frozenset(vars(torch.nn.Module()))
_FRAMEWORKS = frozenset({
    *("torch", "numpy", "pytorch_lightning", "lightning", "lightning_fabric", "torchmetrics"),
    *("lightning_utilities", "hybridtrain", "_pytest", "pytest"),
})  # fmt: skip


T = TypeVar("T")


class ReachedObject(NamedTuple, Generic[T]):
    """An object, its mark, the one that holds it, and the way to it."""

    value: Any
    mark: T
    owner: Any
    link: Link

    @property
    def path(self) -> str:
        """Its name for users, as ``train_dataloaders.dataset.pool``."""
        parts: list[str] = []
        link: Link | None = self.link
        while link is not None:
            above, kind, name = link
            parts.append({"item": f"[{name!r}]", "attribute": f".{name}"}.get(kind, str(name)))
            link = None if kind == "global" else above
        return "".join(reversed(parts)).removeprefix(".")

    @property
    def part(self) -> str:
        """The name of the part from which it was reached."""
        link = self.link
        while link[0] is not None:
            link = link[0]
        return str(link[2])


_Place = tuple[Any, Any, Link]  # an object, the one that holds it, the way


class Walk(Generic[T]):
    """The objects of marked classes that can be reached from the named ``parts``.

    Args:
        parts: by their names.
        beyond: objects that it does not enter.
        mark_of: the mark of a class; ``None``: none. It does not enter objects with one.
    """

    def __init__(
        self,
        parts: Mapping[str, Any],
        beyond: Iterable[Any],
        mark_of: Callable[[type], T | None],
    ) -> None:
        self._parts, self._mark_of = parts, mark_of
        self._seen: dict[int, Any] = {id(each): each for each in beyond}  # kept: or ids come again
        self._ways: dict[type, Callable[[Any], Iterator[Step]] | None] = {}
        self._marks: dict[type, T] = {}
        self._slots: dict[type, _Slots] = {}
        self._classes: set[type] = set()

    def __iter__(self) -> Iterator[ReachedObject[T]]:
        due: deque[_Place] = deque()
        for name, part in self._parts.items():
            self._admit(due, None, (None, "part", name), part)
        while due and len(self._seen) < _MOST:
            value, owner, link = due.popleft()
            kind = type(value)
            if kind not in self._ways:
                self._know(kind)
            if (way := self._ways[kind]) is None:
                yield ReachedObject(value, self._marks[kind], owner, link)
                continue
            for step, name, held in way(value):
                self._admit(due, value, (link, step, name), held)

    def reaches(self, value: object) -> bool:
        """Whether the walk has come to this object so far."""
        return id(value) in self._seen

    def _admit(self, due: deque[_Place], owner: Any, link: Link, value: Any) -> None:
        if type(value) not in _LEAVES and id(value) not in self._seen:
            self._seen[id(value)] = value
            due.append((value, owner, link))

    def _know(self, kind: type) -> None:
        """Decide how to go on from objects of a class."""
        if (mark := self._mark_of(kind)) is not None:
            self._marks[kind], self._ways[kind] = mark, None
            return
        default = self._of_class if issubclass(kind, type) else self._of_object
        self._ways[kind] = next((way for base, way in _WAYS if issubclass(kind, base)), default)

    def _of_object(self, value: Any) -> Iterator[Step]:
        """Attributes, also of its class if that is a user's; of an object in C what it holds."""
        kind = type(value)
        slots = self._slots.get(kind)
        if slots is None:
            slots = self._slots[kind] = _slots_of(kind)
            yield from self._of_class(kind)
        own = _dict_of(value)
        if own is None and not slots:
            for held in _first(gc.get_referents(value)):
                if not isinstance(held, type):
                    yield "same", "", held
        elif issubclass(kind, torch.nn.Module):
            yield from _of_module(own or {})
        else:
            yield from _of_attributes(own or {}, slots, value)

    def _of_class(self, kind: type) -> Iterator[Step]:
        for base in kind.__mro__:
            if base in self._classes or is_framework(base.__module__):
                continue
            self._classes.add(base)
            for name, held in list(vars(base).items()):
                yield "global", f"{base.__qualname__}.{name}", _plain(held)


_HIDDEN = frozenset({"_waiters"})  # of a condition: locks that are held while threads wait


def is_framework(module: object) -> bool:
    """Whether a module is the standard library's, or of a package with which all of us work."""
    top = str(module).partition(".")[0]
    return top in _FRAMEWORKS or (top in sys.stdlib_module_names and top != "__main__")


def _plain(held: Any) -> Any:
    """The function below a decorator of classes."""
    if isinstance(held, staticmethod | classmethod):
        return held.__func__
    return held.fget if isinstance(held, property) else held


_Slots = list[tuple[str, MemberDescriptorType]]


def _slots_of(kind: type) -> _Slots:
    members = [vars(base).items() for base in kind.__mro__ if "__slots__" in vars(base)]
    found = (pair for each in members for pair in each)
    return [(name, slot) for name, slot in found if isinstance(slot, MemberDescriptorType)]


def _dict_of(value: Any) -> dict[str, Any] | None:
    """Its attributes; ``None`` if it has no such dict."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


# ---- ways through objects of known classes ------------------------------------------------------


def _of_dict(value: dict[Any, Any]) -> Iterator[Step]:
    for name, held in _first(dict.items(value)):
        yield "item", name, held
    yield from _of_subclass(value)


def _of_elements(kind: Any, value: Any) -> Iterator[Step]:
    for index, held in enumerate(_first(kind.__iter__(value))):
        yield "item", index, held
    yield from _of_subclass(value)


def _of_subclass(value: Any) -> Iterator[Step]:
    """Attributes of a container whose class is a user's."""
    if (own := _dict_of(value)) is not None:
        yield from _of_attributes(own, (), value)


def _of_attributes(
    own: dict[str, Any], slots: Iterable[tuple[str, MemberDescriptorType]], value: Any
) -> Iterator[Step]:
    for name, held in _first(own.items(), _MOST_ATTRIBUTES):
        if name not in _HIDDEN:
            yield "attribute", name, held
    for name, slot in slots:
        try:
            yield "attribute", name, slot.__get__(value)
        except AttributeError:  # not set
            continue


def _of_module(own: dict[str, Any]) -> Iterator[Step]:
    """A module shows its layers as attributes."""
    for held in (own, own.get("_modules", {})):
        for name, each in _first(held.items(), _MOST_ATTRIBUTES):
            if name not in _STANDARD:
                yield "attribute", name, each


def _first(elements: Iterable[Any], most: int = _MOST_OF_ONE) -> list[Any]:
    """The first elements; none if another thread changes the container meanwhile."""
    try:
        return list(islice(elements, most))
    except RuntimeError:
        return []


def _of_method(value: MethodType) -> Iterator[Step]:
    yield "same", "", value.__self__
    yield "same", "", value.__func__


def _of_builtin(value: BuiltinFunctionType) -> Iterator[Step]:
    """A method of an object in C, unless it is a function of a module."""
    yield "same", "", value.__self__


def _of_partial(value: partial[Any]) -> Iterator[Step]:
    yield "same", "", value.func
    yield "same", "", value.args
    yield "same", "", value.keywords


def _of_cell(value: CellType) -> Iterator[Step]:
    try:
        yield "same", "", value.cell_contents
    except ValueError:  # empty
        return


def _of_function(function: FunctionType) -> Iterator[Step]:
    """Closure, defaults, and globals that user code names."""
    if is_framework(function.__module__):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield "global", f"{name} of {function.__qualname__}", cell
    for held in (function.__defaults__, function.__kwdefaults__):
        yield "global", f"a default of {function.__qualname__}", held
    there = function.__globals__
    for name in _names_in(function.__code__):
        if name in there:
            yield "global", f"{function.__module__}.{name}", there[name]


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names_in(each)


def _of_nothing(value: Any) -> Iterator[Step]:
    return iter(())


_WAYS: tuple[tuple[Any, Callable[[Any], Iterator[Step]]], ...] = (
    (dict, _of_dict),
    *((kind, partial(_of_elements, kind)) for kind in (list, tuple, set, frozenset, deque)),
    (FunctionType, _of_function),
    (MethodType, _of_method),
    (BuiltinFunctionType, _of_builtin),
    (partial, _of_partial),
    (CellType, _of_cell),
    ((torch.Tensor, np.ndarray, torch.storage.UntypedStorage, str, bytes), _of_nothing),
)
