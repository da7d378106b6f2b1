"""Checks values of options and the content of files against types and ranges.

An option is described where it is declared, by a field or parameter with its type and, in
``Annotated``, its range: ``k: Positive | None``. :func:`check` holds a value to it, :func:`words`
puts it into words for messages and for the tables of the documentation. :func:`misfit` compares the
content of a record or checkpoint with a description built from such types.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import lru_cache, wraps
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeGuard,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from hybridtrain.errors import UserError
from hybridtrain.util.own_parts import TARGET, identity, is_class, make_part

F = TypeVar("F", bound=Callable[..., Any])
_SHOWN = 100  # characters of a value
_WORD = re.compile(r"[A-Za-z_][\w./-]*")


@dataclass(frozen=True)
class Range:
    """The numbers allowed: from ``least`` to ``most``, without the ends where ``open`` says so."""

    least: float
    most: float = math.inf
    open: Literal["", "(", ")", "()"] = ""
    infinite: bool = False

    def holds(self, value: Any) -> bool:
        """Whether the number lies in it."""
        above = value > self.least if "(" in self.open else value >= self.least
        below = value < self.most if ")" in self.open else value <= self.most
        return bool(above and below and (abs(value) < math.inf or self.infinite))

    def __str__(self) -> str:
        if self.most == math.inf:
            least = f"above {self.least}" if "(" in self.open else f"from {self.least} on"
            return least + ", or inf" * self.infinite
        least = f"above {self.least}" if "(" in self.open else f"from {self.least}"
        to = "to below" if ")" in self.open else "and up to" if self.open else "to"
        return f"{least} {to} {self.most}"


@dataclass(frozen=True)
class Rule:
    """The values for which ``holds`` is true, in words."""

    text: str
    holds: Callable[[Any], object]

    def __str__(self) -> str:
        return self.text


FILLED = Rule("(one at least)", len)
_TYPED = "_typed"  # the attribute of a part that has the words it was made from
_PLAIN = (str, int, float, Sequence, Mapping, NoneType)

Natural = Annotated[int, Range(0)]
Count = Annotated[int, Range(0, 2**62)]  # that fits in 64 bits
Positive = Annotated[int, Range(1)]
Finite = Annotated[float, Rule("that is finite", math.isfinite)]
Workers = Annotated[int, Range(1, 4096)]  # or devices
NotNegative = Annotated[float, Range(0)]
Above0 = Annotated[float, Range(0, open="(")]
Share = Annotated[float, Range(0, 1)]
ShareAbove0 = Annotated[float, Range(0, 1, open="(")]
Decay = Annotated[float, Range(0, 1, open=")")]
Several = Annotated[Sequence[Positive], FILLED]
Part = Annotated[Any, Rule("an object", lambda value: not isinstance(value, (*_PLAIN, type)))]
Named = str | Mapping[str, Any] | Part  # a name, a mapping with a name and parameters, an object


def check(name: str, value: Any, kind: Any, plain: bool = False) -> None:
    """See that an option's value is of a type and in its range.

    Args:
        plain: numbers, words, lists and mappings alone, as a configuration has them.

    Raises:
        UserError: naming what was given and what is allowed.
    """
    if allows(value, kind, plain):
        return
    if isinstance(value, Mapping) and (form := _form(value, kind)) is not None:
        _check_keys(name, value, form, plain)
    raise refusal(name, value, kind, plain)


def refusal(name: str, value: Any, kind: Any, plain: bool = True) -> UserError:
    """The error for a value that is not allowed."""
    allowed = words(kind).replace(", an object", "") if plain else words(kind)
    meant = hint(value, _each(kind)) if isinstance(value, str) else ""
    huge = ", of 64 bits" if type(value) is int and not _SIMPLE[int](value) else ""
    return UserError(f"{name}={shown(value, plain)} was given{meant}; it must be {allowed}{huge}")


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether the value is a number; ``True`` and ``False`` are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


_MOST_BITS = 1024


def shown(value: Any, plain: bool = False) -> str:
    """A value, as short as a line needs it; ``plain``: as YAML has it."""
    yaml = {None: "null", True: "true", False: "false"}
    if plain and isinstance(value, bool | NoneType):
        text = yaml[value]
    elif plain and isinstance(value, str) and _WORD.fullmatch(value):
        text = value
    elif isinstance(value, int) and value.bit_length() > _MOST_BITS:  # Python may not print it
        text = f"a whole number of {value.bit_length():,} bits"
    else:
        text = identity(value)
    return cut(text)


def cut(text: str) -> str:
    """As much of a text as a line needs."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text)} characters)"


def _form(value: Mapping[Any, Any], kind: Any) -> Any:
    """The ``TypedDict``, of those in a union, with which the mapping shares a key."""
    forms = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    forms = tuple(each for each in forms if is_typeddict(each))
    return next((each for each in forms if hints(each).keys() & value.keys()), None)


def _check_keys(name: str, value: Mapping[Any, Any], form: Any, plain: bool) -> None:
    kinds = hints(form)
    check_names(f"{name}.", value, kinds)
    for key, each in kinds.items():
        if key in value or key in form.__required_keys__:
            check(f"{name}.{key}", value.get(key), each, plain)


def check_fields(given: Any, prefix: str = "") -> None:
    """See that every field that an object was made with is of its type; raises UserError."""
    kinds: dict[str, Any] = hints(type(given))  # type: ignore[arg-type]
    for each in fields(given):
        if each.init:
            check(prefix + each.name, getattr(given, each.name), kinds[each.name])


class Checked:
    """A dataclass that checks its fields against their types; raises UserError."""

    prefix: ClassVar[str] = ""  # of its fields, in messages

    def __post_init__(self) -> None:
        check_fields(self, self.prefix)


def check_arguments(
    call: Callable[..., Any], given: Mapping[str, Any], prefix: str, plain: bool = False
) -> None:
    """See that arguments of a function or class are of the types it declares; raises UserError."""
    kinds, parameters = hints(call), inspect.signature(call).parameters
    for name, value in given.items():
        default = parameters[name].default if name in parameters else None
        if name in kinds and not (value is None and default is None):
            check(prefix + name, value, kinds[name], plain)


def typed(prefix: str) -> Callable[[F], F]:
    """Check a function's arguments against their declared types in every call.

    Args:
        prefix: of their names, in messages.
    """

    def decorate(function: F) -> F:
        takes = inspect.signature(function)

        @wraps(function)
        def held(*args: Any, **kwargs: Any) -> Any:
            check_arguments(function, takes.bind(*args, **kwargs).arguments, prefix)
            return function(*args, **kwargs)

        return cast(F, held)

    return decorate


@lru_cache(maxsize=512)
def hints(described: Any) -> dict[str, Any]:
    """Types by the names of fields or parameters; empty where they cannot be resolved."""
    if inspect.isclass(described) and not is_dataclass(described) and not is_typeddict(described):
        described = described.__init__
    try:
        return get_type_hints(described, include_extras=True)
    except (NameError, TypeError, AttributeError):  # imported for type checkers alone
        return {}


# ---- types --------------------------------------------------------------------------------------


def is_target(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether an object will be made of it: a mapping with ``_target_``."""
    return isinstance(value, Mapping) and TARGET in value


def has_target(value: object) -> bool:
    """Whether it is such a mapping, or has one in it."""
    if isinstance(value, Mapping):
        return is_target(value) or any(map(has_target, value.values()))
    return isinstance(value, list | tuple) and any(map(has_target, value))


def takes_object(kind: Any) -> bool:
    """Whether a value of this type may be an object; a number, a text or a choice is none."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType, Annotated):
        return any(map(takes_object, inside[:1] if origin is Annotated else inside))
    simple = kind in _SIMPLE and kind not in (Any, object)
    return not (simple or origin is Literal or is_typeddict(kind))


def allows(value: Any, kind: Any, plain: bool = False) -> bool:
    """Whether a value is of a type and in its range. Types that cannot be checked allow all."""
    origin, inside = get_origin(kind), get_args(kind)
    if plain and is_target(value):
        return takes_object(kind)
    if origin is Annotated:
        ranges = [note for note in inside[1:] if isinstance(note, Range | Rule)]
        return allows(value, inside[0], plain) and all(each.holds(value) for each in ranges)
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in inside)
    if origin in (Union, UnionType):
        return any(allows(value, each, plain) for each in inside)
    if isinstance(origin or kind, type):
        return _is_a(value, origin or kind, inside, plain)
    return True


def _is_a(value: Any, kind: type, inside: Sequence[Any], plain: bool) -> bool:
    if kind in _SIMPLE:
        return _SIMPLE[kind](value)
    if is_typeddict(kind):
        return isinstance(value, Mapping) and _fits(value, kind, plain)
    if issubclass(kind, Mapping):
        fits = isinstance(value, Mapping)
        return fits and all(allows(each, inside[1], plain) for each in inside and value.values())
    if issubclass(kind, Sequence):
        several = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        if not several or not inside or inside[0] is Any:
            return several
        return all(allows(each, inside[0], plain) for each in value)
    if plain or getattr(kind, "_is_protocol", False):
        return not isinstance(value, _PLAIN)
    return isinstance(value, kind)


def _fits(value: Mapping[Any, Any], kind: Any, plain: bool) -> bool:
    """Whether a mapping has the keys of a ``TypedDict``, with values of their types."""
    kinds = hints(kind)
    return kind.__required_keys__ <= value.keys() <= kinds.keys() and all(
        allows(each, kinds[key], plain) for key, each in value.items()
    )


_INT64 = 2**63  # torch and the system take no larger ones
_ENDS = (math.inf, -math.inf)
_SIMPLE: dict[Any, Callable[[Any], bool]] = {
    Any: lambda value: True,
    object: lambda value: True,
    bool: lambda value: isinstance(value, bool),
    int: lambda value: type(value) is int and -_INT64 <= value < _INT64,
    float: lambda value: is_number(value) and (abs(value) <= sys.float_info.max or value in _ENDS),
    str: lambda value: isinstance(value, str),
    Path: lambda value: isinstance(value, str | Path),
    NoneType: lambda value: value is None,
}


def words(kind: Any) -> str:
    """The values that a type allows, in words."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Annotated:
        notes = [f"; {note}" if isinstance(note, str) else f" {note}" for note in inside[1:]]
        return "".join([words(inside[0]), *notes]).strip()
    if origin in (Union, UnionType, Literal) or kind is bool:
        several = list(dict.fromkeys(_each(kind)))
        last = ", or " if any(" " in each for each in several) else " or "
        return last.join([", ".join(several[:-1]), several[-1]][not several[:-1] :])
    if is_typeddict(kind):
        return f"{{{', '.join(f'{name}: {words(each)}' for name, each in hints(kind).items())}}}"
    if isinstance(origin, type) and issubclass(origin, Sequence):
        each = words(inside[0]) if inside else ""
        return f"a list of which each is {each}" if each else "a list"
    return _WORDS.get(origin or kind, getattr(kind, "__name__", str(kind)))


def _each(kind: Any) -> Iterator[str]:
    """The values that each part of a union allows, in words."""
    if kind is bool:
        yield from ("true", "false")
    elif get_origin(kind) is Literal:
        yield from map(str, get_args(kind))
    elif get_origin(kind) in (Union, UnionType):
        for each in get_args(kind):
            yield from _each(each)
    else:
        yield words(kind)


_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    Any: "",
    Path: "a path",
    NoneType: "null",
    Mapping: "a mapping",
    dict: "a mapping",
    list: "a list",
}


# ---- content of files ---------------------------------------------------------------------------

EACH = "*"
_ABSENT = object()


def misfit(value: Any, wanted: Any, place: str) -> str | None:
    """Say where the content of a file differs from its description; ``None``: nowhere.

    Args:
        wanted: a type as above; a tuple of descriptions, of which one must fit; ``[description]``
            of each member of a list or tuple; or ``{key: description}`` of a mapping, which may
            have other keys. ``key?`` may be absent; ``*`` describes the value of every key,
            ``*loop`` of every key that ends so.
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
        case _ if allows(value, wanted):
            return None
    scalar = isinstance(value, str | int | float | NoneType)
    given = shown(value) if scalar else f"of type {type(value).__name__}"
    must = words(type(wanted) if isinstance(wanted, list | dict) else wanted)
    return f"{place} is {'missing' if value is _ABSENT else given}, and must be {must}"


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


# ---- parts of a strategy by name: backup, {name: backup, k: 3}, or the object itself ------------

T = TypeVar("T")


def choose(what: str, given: Any, known: Mapping[str, Callable[..., T]], kind: type[T]) -> T:
    """Make the part that a name or a mapping stands for.

    Args:
        what: the option's name, for messages.
        given: a name, a mapping with ``name`` and parameters, one with ``_target_`` and arguments,
            or an object of ``kind``.
        known: factories by name.
        kind: type of the result.

    Raises:
        UserError: if there is no such name or parameter, or the object is no ``kind``.
    """
    if (own := own_part(what, given, kind)) is not None:
        return own
    name, options = checked_choice(what, given, known)
    made = known[name](**options)
    with suppress(AttributeError):  # a class of the user's with slots
        object.__setattr__(made, _TYPED, _as_typed(name, options, known[name]))
    return made


def own_part(what: str, given: Any, kind: type[T]) -> T | None:
    """The object given, or that a ``_target_`` stands for; ``None``: a name, or one in a mapping.

    Raises:
        UserError: if it is a class, or no object of ``kind``.
    """
    if isinstance(given, type):
        raise is_class(what, given)
    if isinstance(given, _PLAIN) and not is_target(given):
        return None
    made = make_part(what, given) if is_target(given) else given
    if isinstance(made, kind):
        return made
    said = given[TARGET] if is_target(given) else as_typed(given)
    raise UserError(f"{what}={said} was given, which is no {kind.__name__}{_lacks(made, kind)}")


def _lacks(made: object, kind: type) -> str:
    """Describe what an object lacks to be of a class or protocol."""
    if not getattr(kind, "_is_protocol", False):
        return f": it must inherit {kind.__module__}.{kind.__qualname__}"
    names = {name for base in kind.__mro__ for name in (*vars(base), *_annotated(base))}
    lacks = sorted(name for name in names if name[0] != "_" and not hasattr(made, name))
    return f": it lacks {', '.join(lacks)}" if lacks else ""


def _annotated(base: type) -> Collection[str]:
    return inspect.get_annotations(base)


def _as_typed(
    name: str, options: Mapping[str, Any], factory: Callable[..., Any] | None = None
) -> str:
    """Write a choice as it is typed, without options that have their defaults."""
    known = {} if factory is None else inspect.signature(factory).parameters
    own = {k: v for k, v in options.items() if k not in known or known[k].default != v}
    inner = ", ".join(f"{key}: {as_typed(value)}" for key, value in own.items())
    return f"{{name: {name}, {inner}}}" if inner else name


def as_typed(part: Any) -> str:
    """A part as the user has typed it: a name, or ``{name: ssp, lead: 4}``; else the object."""
    if isinstance(part, Mapping) and "name" in part:
        return _as_typed(str(part["name"]), {k: v for k, v in part.items() if k != "name"})
    if is_target(part):
        return "{" + ", ".join(f"{key}: {as_typed(value)}" for key, value in part.items()) + "}"
    return str(getattr(part, _TYPED, None) or shown(part, plain=True))


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


def check_names(prefix: str, given: Iterable[object], known: Collection[str]) -> None:
    """Refuse a name that is not known; raises UserError."""
    for name in given:
        if name not in known:
            raise UserError(f"{prefix}{name} was given{hint(str(name), known)}; {_known(known)}")


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
        said = ", ".join(f"{name}={identity(value)}" for name, value in given.items())
        return f"{type(self).__name__}({said})"
