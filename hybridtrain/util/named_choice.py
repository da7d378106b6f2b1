"""Parts of a strategy by name: ``backup``, ``{name: backup, k: 3}``, or the object itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, TypeVar

from hybridtrain.errors import UserError
from hybridtrain.util.option_types import check_arguments, shown

T = TypeVar("T")


def choose(what: str, given: Any, known: Mapping[str, Callable[..., T]], kind: type[T]) -> T:
    """Make the part that a name or a mapping stands for.

    Args:
        what: the option's name, for messages.
        given: a name, a mapping with ``name`` and parameters, or an object of ``kind``.
        known: factories by name.
        kind: type of the result.

    Raises:
        UserError: if there is no such name or parameter.
    """
    if not isinstance(given, str | Mapping) and isinstance(given, kind):
        return given
    name, options = checked_choice(what, given, known)
    return known[name](**options)


def checked_choice(
    what: str, given: Any, known: Mapping[str, Callable[..., Any]], plain: bool = False
) -> tuple[str, dict[str, Any]]:
    """The name and parameters given, checked against the known names and their types.

    Raises:
        UserError: if there is no such name or parameter, or its value is not allowed.
    """
    name = name_of(given)
    if name is None:
        lacks = " without a name" * isinstance(given, Mapping)
        raise UserError(f"{what}={shown(given, plain)} was given{lacks}; {_known(known)}")
    if name not in known:
        raise UserError(f"{what}={shown(name)} was given{hint(name, known)}; {_known(known)}")
    options = {str(k): v for k, v in given.items() if k != "name"} if given != name else {}
    takes = list(inspect.signature(known[name]).parameters)
    for option in options:
        if option not in takes:
            others = [x for x in known if option in inspect.signature(known[x]).parameters]
            raise UserError(
                f"{what}.{option} was given{hint(option, takes)}; {name} takes "
                f"{', '.join(takes) or 'no parameters'}"
                + (f", {option} is one of {', '.join(others)}" if others else "")
            )
    check_arguments(known[name], options, f"{what}.", plain)
    return name, options


def name_of(given: Any) -> str | None:
    """The name that is given alone, or in a mapping with parameters."""
    name = given.get("name") if isinstance(given, Mapping) else given
    return name if isinstance(name, str) else None


def hint(word: str, words: Iterable[str]) -> str:
    """A question with the closest of these words, if one is close."""
    close = get_close_matches(word, list(words), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _known(known: Iterable[str]) -> str:
    return f"known are {', '.join(sorted(known))}"


class BriefRepr:
    """A dataclass whose ``repr`` leaves out fields that are ``None`` or ``False``.

    Records compare these texts, so a new option must not change those of older records.
    """

    def __repr__(self) -> str:
        told = {each.name: getattr(self, each.name) for each in fields(self) if each.repr}  # type: ignore[arg-type]
        given = {
            name: value for name, value in told.items() if value is not None and value is not False
        }
        said = ", ".join(f"{name}={value!r}" for name, value in given.items())
        return f"{type(self).__name__}({said})"
