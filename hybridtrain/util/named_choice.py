"""Parts of a strategy by name: ``backup``, ``{name: backup, k: 3}``, or the object itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, TypeVar

from hybridtrain.errors import UserError

T = TypeVar("T")


def choose(what: str, given: Any, known: Mapping[str, Callable[..., T]], kind: type[T]) -> T:
    """Make what is asked for.

    Args:
        what: the option's name, for messages.
        given: a name, a mapping with ``name`` and parameters, or an object of ``kind``.
        known: what makes each, by name.
        kind: what comes out.

    Raises:
        UserError: if there is no such name or parameter.
    """
    if isinstance(given, str):
        return _make(what, given, {}, known)
    if isinstance(given, Mapping):
        options = {str(key): value for key, value in given.items()}
        name = options.pop("name", None)
        if not isinstance(name, str):
            raise UserError(f"{what}={dict(given)} was given without a name; {_known(known)}")
        return _make(what, name, options, known)
    if isinstance(given, kind):
        return given
    raise UserError(f"{what}={given!r} was given; {_known(known)}, or a {kind.__name__} object")


def _make(
    what: str, name: str, options: dict[str, Any], known: Mapping[str, Callable[..., T]]
) -> T:
    if name not in known:
        raise UserError(f"{what}={name!r} was given{hint(name, known)}; {_known(known)}")
    takes = list(inspect.signature(known[name]).parameters)
    for option in options:
        if option not in takes:
            others = [x for x in known if option in inspect.signature(known[x]).parameters]
            raise UserError(
                f"{what}.{option} was given{hint(option, takes)}; {name} takes "
                f"{', '.join(takes) or 'no parameters'}"
                + (f", {option} is one of {', '.join(others)}" if others else "")
            )
    return known[name](**options)


def hint(word: str, words: Iterable[str]) -> str:
    """A question with the closest of these words, if one is close."""
    close = get_close_matches(word, list(words), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _known(known: Iterable[str]) -> str:
    return f"known are {', '.join(sorted(known))}"


class BriefRepr:
    """A dataclass whose text leaves out what is ``None`` or ``False``.

    Records compare these texts, so an option that is added later must not change the old ones.
    """

    def __repr__(self) -> str:
        told = {each.name: getattr(self, each.name) for each in fields(self) if each.repr}  # type: ignore[arg-type]
        given = {
            name: value for name, value in told.items() if value is not None and value is not False
        }
        said = ", ".join(f"{name}={value!r}" for name, value in given.items())
        return f"{type(self).__name__}({said})"
