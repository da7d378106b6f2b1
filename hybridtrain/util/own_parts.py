"""Parts of the user's own: made from ``_target_``, and described by class and arguments.

A part is a policy, an exchange, an update or a correction.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hybridtrain.errors import UserError

TARGET = "_target_"
_HYDRAS_OWN = (TARGET, "_args_", "_convert_", "_partial_", "_recursive_")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_DEPTH = 8  # of parts in parts
_NOWHERE = object()


# ---- made from a name ----------------------------------------------------------------------------


def load_target(key: str, name: str) -> Callable[..., Any]:
    """The class or function of this dotted name.

    Args:
        key: of the configuration, for messages.

    Raises:
        UserError: if there is none, or its module raises on import.
        ModuleNotFoundError: if a package is missing that an existing module imports.
    """
    top, dot, _ = name.partition(".")
    if not re.fullmatch(r"\w+(\.\w+)+", name) or importlib.util.find_spec(top) is None:
        absent = f": there is no module {top!r} to import{_where()}" if dot else ""
        raise UserError(f"{key}.{TARGET}={name[:100]}{absent}; give package.Class")
    try:
        found = pkgutil.resolve_name(name)
    except ModuleNotFoundError:
        raise  # a package missing inside an existing module has its own error line
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{key}.{TARGET}={name} cannot be imported: {reason}") from error
    if not callable(found):
        raise UserError(f"{key}.{TARGET}={name} is not a class or function")
    return found


def _where() -> str:
    """Where a module was looked for, and what adds a directory."""
    said = os.environ.get("PYTHONPATH")
    here = "" if {"", str(Path.cwd())}.isdisjoint(sys.path) else f" in {Path.cwd()},"
    among = f"PYTHONPATH={said}" if said else "PYTHONPATH (not set)"
    return (
        f" (looked{here} in {among} and among installed packages; cd to the directory that has "
        "it, or add that to PYTHONPATH)"
    )


def make_part(what: str, given: Mapping[str, Any]) -> Any:
    """Make the object that ``{"_target_": "package.Class", ...arguments}`` stands for.

    Arguments may be such mappings themselves.

    Args:
        what: the option's name, for messages.

    Raises:
        UserError: if there is no such class, or it does not take these arguments.
        Exception: of the class itself.
    """
    made = load_target(what, str(given[TARGET]))
    options = {str(k): _made(f"{what}.{k}", v) for k, v in given.items() if k not in _HYDRAS_OWN}
    positional = [_made(what, each) for each in given.get("_args_", ())]
    try:
        inspect.signature(made).bind(*positional, **options)
    except TypeError as error:
        raise UserError(f"{what}: {given[TARGET]} refuses its arguments: {error}") from error
    except ValueError:  # it has no signature
        pass
    if given.get("_partial_"):
        return partial(made, *positional, **options)
    try:
        return made(*positional, **options)
    except ValueError as error:
        raise UserError(f"{what}: {given[TARGET]} refuses its arguments: {error}") from error


def _made(what: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        if TARGET in value:
            return make_part(what, value)
        return {key: _made(f"{what}.{key}", each) for key, each in value.items()}
    return [_made(what, each) for each in value] if isinstance(value, list) else value


def is_class(what: str, given: object) -> UserError:
    """The error for a class that was given in place of an object of it."""
    name = getattr(given, "__name__", str(given))
    if hasattr(given, "zero_grad"):
        return UserError(
            f"{what}={name} was given, which is a class of optimizers; return one from "
            "configure_optimizers, or give the name of one of torch.optim"
        )
    return UserError(f"{what}={name} was given, which is a class; write {name}() to make an object")


# ---- described by class and arguments ------------------------------------------------------------


def identity(part: Any, depth: int = _DEPTH) -> str:
    """Describe a part in words that are the same in every process.

    The part's ``repr``, unless an address in memory is in it, or it comes from a base class, which
    may not know all arguments; then class and arguments: ``my.Quorum(least=2)``. An argument is
    read from the attribute of its name, or of its name behind ``_``; where one has no such
    attribute, all attributes are taken.
    """
    inner = partial(identity, depth=depth - 1)
    kind = type(part)
    if depth == 0 or isinstance(part, type):
        return _name(part if isinstance(part, type) else kind)
    if kind in (dict, list, tuple, set, frozenset):
        return _of_several(part, inner)
    if isinstance(part, partial):
        arguments = [*map(inner, part.args), *_named(part.keywords, inner)]
        return f"{inner(part.func)}({', '.join(arguments)})"
    if _speaks_for_itself(kind):
        if is_dataclass(part) and hasattr(kind.__repr__, "__wrapped__"):  # made by dataclasses
            return f"{kind.__qualname__}({', '.join(_named(_fields(part), inner))})"
        if not _ADDRESS.search(text := repr(part)):
            return text
    if callable(part) and hasattr(part, "__qualname__"):  # a function
        return _name(part)
    return f"{_name(kind)}({', '.join(_named(_arguments(part), inner))})"


def _of_several(parts: Any, inner: Callable[[Any], str]) -> str:
    """As Python writes it; members of a set in the order of their texts."""
    if isinstance(parts, dict):
        return f"{{{', '.join(f'{key!r}: {inner(each)}' for key, each in parts.items())}}}"
    texts = list(map(inner, parts))
    if isinstance(parts, list):
        return f"[{', '.join(texts)}]"
    if isinstance(parts, tuple):
        return f"({', '.join(texts)}{',' * (len(texts) == 1)})"
    return f"{type(parts).__name__}({', '.join(sorted(texts))})"


def _speaks_for_itself(kind: type) -> bool:
    """Whether ``repr`` tells all arguments, as the class that defines it has its constructor."""
    if kind.__module__.partition(".")[0] in (__package__.partition(".")[0], "builtins"):
        return True
    for each in kind.__mro__[:-1]:
        if "__repr__" in vars(each):
            return True
        if "__init__" in vars(each):
            return False
    return False


def _named(values: Mapping[str, Any], inner: Callable[[Any], str]) -> list[str]:
    return [f"{name}={inner(value)}" for name, value in values.items()]


def _fields(part: Any) -> dict[str, Any]:
    return {each.name: getattr(part, each.name, None) for each in fields(part) if each.repr}


def _arguments(part: Any) -> dict[str, Any]:
    """The arguments that the object was made with, or all of its attributes."""
    try:
        parameters = inspect.signature(type(part)).parameters.values()
    except (TypeError, ValueError):
        parameters = ()  # type: ignore[assignment]
    found = {each.name: _attribute(part, each.name) for each in parameters}
    if any(value is _NOWHERE for value in found.values()):
        return dict(sorted(getattr(part, "__dict__", {}).items()))
    return found


def _attribute(part: Any, name: str) -> Any:
    own = getattr(part, "__dict__", {})
    return next((own[each] for each in (name, f"_{name}") if each in own), _slot(part, name))


def _slot(part: Any, name: str) -> Any:
    is_slot = any(name in getattr(kind, "__slots__", ()) for kind in type(part).__mro__)
    return getattr(part, name, _NOWHERE) if is_slot else _NOWHERE


def _name(kind: Any) -> str:
    """``my.Quorum``; of a script that is run, the name under which others import it."""
    module = str(getattr(kind, "__module__", None) or "")
    if module == "__main__":
        main = sys.modules["__main__"]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        module = spec.name if spec is not None else Path(file).stem if file else ""
    name = str(getattr(kind, "__qualname__", kind))
    return f"{module}.{name}" if module and module != "builtins" else name
