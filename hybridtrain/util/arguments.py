"""Small commands with ``name=value`` arguments: parsing, standard streams, exit status."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybridtrain.errors import UserError
from hybridtrain.util.option_types import check, hint
from hybridtrain.util.own_parts import TARGET
from hybridtrain.util.streams import (
    hold_standard_streams,
    printable,
    show_warning,
    warnings_shown_by,
)


def options(
    arguments: Sequence[str], known: Sequence[str], families: Sequence[str] = ()
) -> dict[str, str]:
    """Parse ``name=value`` arguments.

    Args:
        known: the names allowed.
        families: names among them that also take members, as in ``slower.3=2``.

    Raises:
        UserError: naming what is not known, and what was meant; or what was given twice.
    """
    given: dict[str, str] = {}
    for argument in arguments:
        name, _, value = argument.partition("=")
        family, member, _ = name.partition(".")
        of = family if member and family in families else name
        if of in known and not value:
            raise UserError(f"{argument!r} was given without a value; say {name}=VALUE")
        if of not in known:
            raise UserError(
                f"{argument!r} was given{hint(name, known)}; known are {', '.join(known)}"
            )
        if name in given:
            raise UserError(f"{name} was given twice; say it once")
        given[name] = value
    return given


def split_options(
    arguments: Sequence[str], known: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Values of a command's own options, and the other arguments, which are keys of a run."""
    own = [each for each in arguments if each.partition("=")[0] in known]
    given = {name: value_of(text) for name, text in options(own, known).items()}
    return given, [each for each in arguments if each not in own]


def value_of(text: str) -> bool | float | str | None:
    """The text as a bool, number or None if it looks like one."""
    words: dict[str, bool | None] = {"true": True, "false": False, "null": None}
    if text in words:
        return words[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def read_value(name: str, text: str, kind: Any) -> Any:
    """The value of an option of this kind; raises ``UserError`` if it is of another."""
    value = text if kind is str else value_of(text)
    check(name, value, kind, plain=True)
    return value


def command(
    action: Callable[[Sequence[str]], int | None],
    usage: str | None,
    arguments: Sequence[str] | None,
) -> int:
    """Run ``action`` on the arguments, by default those of the process; returns the exit status.

    What ``action`` returns, or 0; 0 after ``usage`` for ``-h`` and ``--help``; 2 after one line on
    standard error for bad input; 130 after Ctrl-C.
    """
    hold_standard_streams()
    given = sys.argv[1:] if arguments is None else list(arguments)
    if {"-h", "--help"} & set(given):
        print(usage)
        return 0
    try:
        with warnings_shown_by(show_warning):
            status = action(given)
    except (UserError, OSError) as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status or 0


# ---- parts of a strategy -------------------------------------------------------------------------


def part_of(what: str, text: str) -> Any:
    """A part of a strategy: a name, or a mapping with its parameters.

    ``backup``; ``backup:k=3``; ``my.Mine:k=3``, a class; or a mapping as YAML has it,
    ``{_target_: my.Mine, k: 3}``.

    Args:
        what: the option's name, for messages.

    Raises:
        UserError: if it is none of them.
    """
    if text.startswith("{"):
        return _mapping(what, text)
    name, *options = text.split(":")
    found: dict[str, Any] = {TARGET if "." in name else "name": name}
    for option in options:
        key, separator, value = option.partition("=")
        if not key or not separator or not value:
            raise UserError(
                f"{what}={text} was given; options follow the name as :option=value, like "
                "backup:k=3 or ssp:lead=2"
            )
        found[key] = value_of(value)
    return found if options or TARGET in found else name


def _mapping(what: str, text: str) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{what}={text} was given, which is no YAML: {reason}") from error
    if not isinstance(found, dict) or not {"name", TARGET} & found.keys():
        raise UserError(
            f"{what}={text} was given; a mapping has a name, or {TARGET}, the class of an object: "
            f"{{{TARGET}: my.Mine, k: 3}}"
        )
    return {str(key): value_of(x) if isinstance(x, str) else x for key, x in found.items()}


def split_values(text: str) -> list[str]:
    """The values between commas; those within brackets or braces are parts of a value."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter in "{[(") - (letter in "}])")
        if letter == "," and depth <= 0:
            found.append("")
        else:
            found[-1] += letter
    return [each.strip() for each in found] if "{" in text else found


def spelled(part: str | Mapping[str, Any]) -> str:
    """A part of a strategy as commands take it, less what is null: ``backup:k=3``."""
    if isinstance(part, str):
        return part
    own = TARGET if TARGET in part else "name"
    given = {name: value for name, value in part.items() if name != own and value is not None}
    options = (f":{name}={json.dumps(value).strip(chr(34))}" for name, value in given.items())
    return str(part.get(own)) + "".join(options)
