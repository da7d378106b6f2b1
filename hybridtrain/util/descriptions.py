"""Compares plain data, of JSON or of a checkpoint, with a description of what it may be.

A description is one of

- a type, ``None``, or a :class:`Rule`: a value of that kind (a truth value is no number);
- a tuple of descriptions: any of them;
- ``[description]``: a list or tuple of such members;
- ``{name: description}``: a mapping with these keys, and maybe others. ``name?`` may be absent,
  and ``*`` describes the value of every key, ``*loop`` of those that end so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

EACH = "*"
_ABSENT = object()


@dataclass(frozen=True)
class Rule:
    """A kind of value: in words, and whether a value is one."""

    text: str
    fits: Callable[[Any], bool]


def whole(least: int = 0, most: int = 2**62) -> Rule:
    """A whole number."""
    return Rule(f"a whole number from {least} on", lambda x: type(x) is int and least <= x <= most)


def real(least: float = -math.inf) -> Rule:
    """A finite number."""
    text = "a finite number" if least == -math.inf else f"a finite number from {least} on"
    return Rule(text, lambda x: type(x) in (int, float) and least <= x and abs(x) < math.inf)


def misfit(value: Any, wanted: Any, place: str) -> str | None:
    """Where a value differs from a description, and how; ``None``: it fits.

    Args:
        place: what the value is called.
    """
    match wanted:
        case tuple():
            found = [misfit(value, each, place) for each in wanted]
            return None if None in found else found[-1]
        case list():
            if isinstance(value, list | tuple):
                return _first((each, wanted[0], f"{place}[{n}]") for n, each in enumerate(value))
        case dict():
            if isinstance(value, Mapping):
                return _first(_members(value, wanted, place))
        case _ if _is(value, wanted):
            return None
    return f"{place} is {_short(value)}, and must be {_named(wanted)}"


def _first(parts: Iterable[tuple[Any, Any, str]]) -> str | None:
    return next((found for part in parts if (found := misfit(*part)) is not None), None)


def _members(value: Any, wanted: dict[str, Any], place: str) -> Iterator[tuple[Any, Any, str]]:
    for name, inner in wanted.items():
        key = name.removesuffix("?")
        if name.startswith(EACH):
            found = [key for key in value if str(key).endswith(name[1:])]
            yield from ((value[key], inner, f"{place}.{key}") for key in found)
        elif key in value or key == name:
            yield value.get(key, _ABSENT), inner, f"{place}.{key}"


def _is(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, Rule):
        return wanted.fits(value)
    if wanted is None:
        return value is None
    return isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))


def _named(wanted: Any) -> str:
    match wanted:
        case Rule():
            return wanted.text
        case list():
            return "a list"
        case dict():
            return "a mapping"
    return "null" if wanted is None else f"of type {wanted.__name__}"


def _short(value: Any) -> str:
    if value is _ABSENT:
        return "missing"
    plain = isinstance(value, str | int | float | bool | None)
    text = repr(value) if plain else f"of type {type(value).__name__}"
    return text if len(text) <= 40 else f"{text[:37]}..."
