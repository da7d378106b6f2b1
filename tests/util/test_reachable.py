"""The walk through what objects hold: what it finds, what it calls it, and where it ends."""

from __future__ import annotations

import csv
import gc
import io
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridtrain.util.reachable import _MOST, Walk


class Wanted:
    """What is looked for."""


IN_A_GLOBAL, IN_ANOTHER = Wanted(), Wanted()


def found(parts: dict[str, Any], *beyond: Any) -> list[str]:
    """The paths of what is looked for."""
    walk = Walk(parts, beyond, lambda kind: "wanted" if kind is Wanted else None)
    return [each.path for each in walk]


class Slotted:
    __slots__ = ("here", "unset")

    def __init__(self) -> None:
        self.here = Wanted()


class Held(list[Any]):
    """A container of a user's class, with an attribute."""


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(1, 1))
        self.inner[0].pool = Wanted()  # type: ignore[assignment]
        self.own = Wanted()


class OfClass:
    pool = Wanted()


class ByMethod:
    def load(self) -> object:
        return helper()


def helper() -> object:
    return [IN_A_GLOBAL for _ in range(3)]


def closure() -> Callable[[], Any]:
    kept = Wanted()
    return lambda: kept


def default(given: Wanted = IN_ANOTHER) -> Wanted:
    return given


def held_by_a_list() -> Held:
    made = Held()
    made.pool = Wanted()  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (SimpleNamespace(pool=Wanted()), "data.pool"),
        (SimpleNamespace(a=SimpleNamespace(b=[0, Wanted()])), "data.a.b[1]"),
        ({"x": (Wanted(),)}, "data['x'][0]"),
        (OrderedDict(x=deque([Wanted()])), "data['x'][0]"),
        (Slotted(), "data.here"),
        (held_by_a_list(), "data.pool"),
        (Net(), "data.own"),
        (OfClass(), "OfClass.pool"),
        (ByMethod(), f"{__name__}.IN_A_GLOBAL"),
        (helper, f"{__name__}.IN_A_GLOBAL"),
        (closure(), "kept of closure.<locals>.<lambda>"),
        (default, "a default of default[0]"),
        (partial(sorted, key=Wanted()), "data['key']"),
        (SimpleNamespace(pool=Wanted()).__eq__, "data.pool"),
        (iter([Wanted()]), "data[0]"),
        ((each for each in [Wanted()]), "data[0]"),
    ],
)
def test_what_is_held_is_found_and_named(value: Any, path: str) -> None:
    assert path in found({"data": value})


def test_layers_of_a_module_are_named_as_its_attributes() -> None:
    assert sorted(found({"model": Net()})) == ["model.inner.0.pool", "model.own"]


def test_a_file_is_found_behind_the_writer_of_its_rows() -> None:
    text = io.StringIO()
    walk = Walk({"log": csv.writer(text)}, (), lambda kind: kind if kind is io.StringIO else None)
    assert [each.value for each in walk] == [text]


def test_objects_beyond_are_not_entered_and_nothing_is_found_twice() -> None:
    trainer = SimpleNamespace(pool=Wanted())
    shared = Wanted()
    assert found({"a": [trainer, shared], "b": shared}, trainer) == ["b"]
    around: list[Any] = [shared]
    around.append(around)
    assert found({"a": around}) == ["a[0]"]


def test_no_code_of_the_user_runs() -> None:
    class Loud:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

        @property
        def pool(self) -> Any:
            raise AssertionError("a property")

        def __iter__(self) -> Any:
            raise AssertionError("iteration")

        def __eq__(self, other: object) -> bool:
            raise AssertionError("comparison")

        __hash__ = None  # type: ignore[assignment]

    loud = Loud()
    loud.here = Wanted()  # type: ignore[attr-defined]
    assert found({"data": loud}) == ["data.here"]


def chain(n: int) -> Any:
    made: Any = None
    for _ in range(n):
        made = SimpleNamespace(next=made)
    return made


def tree(depth: int) -> list[Any]:
    return [tree(depth - 1) for _ in range(8)] if depth else []


@pytest.mark.wide
@pytest.mark.parametrize(
    "data",
    [
        partial(chain, 3 * _MOST),
        partial(tree, 5),
        lambda: [[number] for number in range(10**5)],
        lambda: {str(number): [number] for number in range(10**5)},
        lambda: SimpleNamespace(**{f"a{number}": [] for number in range(10**5)}),
    ],
)
def test_a_walk_through_many_objects_ends_and_sees_what_lies_near(
    data: Callable[[], Any],
) -> None:
    parts = {"data": SimpleNamespace(samples=data()), "model": SimpleNamespace(pool=Wanted())}
    walk = Walk(parts, (), lambda kind: "wanted" if kind is Wanted else None)
    before = calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        paths = [each.path for each in walk]
    finally:
        sys.setprofile(None)
    assert paths == ["model.pool"]
    assert calls - before < 60 * _MOST, "calls of functions, as a measure of time"
    parts.clear()
    while gc.collect():  # a chain is taken apart piece by piece
        pass
