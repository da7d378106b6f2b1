"""docs/api.md: the signature and one line of all that is public, from the code itself.

``python -m tests.api_page`` writes it anew. The page lists what ``hybridtrain.__all__`` has, and
``SECTIONS`` what parts of one's own need. On the site whole docstrings take the place of each block
(``scripts/site/api_directives.py``).
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import re
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hybridtrain
from hybridtrain.engine.options.strategy_arguments import DEFAULTS

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
HEAD = """# Python

All that is public in Python: signatures, and what each does in one line. The site (`bash
scripts/site.sh`) and `help(hybridtrain.Server)` have the whole docstrings, with arguments, errors
and examples.

- `Named` is a name, a mapping with a `name` and parameters, or an object: `"backup"`,
  `{"name": "backup", "k": 3}`, `MyPolicy()`.
- `...` stands for a default that the docstring names.
- The [reference](reference.md) says what the options of a strategy mean.

`python -m tests.api_page` writes this page.
"""
MEMBERS = {  # of classes that have other public methods, for Lightning or for parts of ours
    "hybridtrain.HybridStrategy": ("run_stats",),
    "hybridtrain.Server": ("run", "replay", "simulate", "save", "load", "model", "stats"),
    "hybridtrain.Worker": (
        *("batches", "push", "pull", "model", "parameters", "copy", "optimizer", "number"),
        *("n_workers", "version", "gather", "save", "stats"),
    ),
    "hybridtrain.DeepDist": ("train", "model", "stats"),
    "hybridtrain.PlainProgress": (),
    "hybridtrain.StepProfiler": (),
}
SECTIONS = {
    "Policies of one's own": (
        "hybridtrain.engine.policies",
        ("Policy", "Needs"),
    ),
    "Facts that a policy hears": (
        "hybridtrain.engine.policies",
        ("Joined", "Began", "Pushed", "Ready", "Waiting", "TimerFired", "Left"),
    ),
    "Orders that it gives": (
        "hybridtrain.engine.policies",
        ("Accumulate", "Apply", "Release", "Drop", "SetTimer"),
    ),
    "Exchanges of one's own": (
        "hybridtrain.engine.exchanges",
        ("Exchange", "LocalExchange", "StepsOwnParameters", "Local", "Offer", "MergeRule"),
    ),
    "Errors": ("hybridtrain.errors", ("UserError", "Lost")),
}
ATTRIBUTES = {"optimizer": "optimizer: Optimizer  # its param_groups hold the learning rate"}
MADE_BY_OURS = {"Worker"}  # never by a user
_NAMED = "str | Mapping[str, Any] | Any"
_WIDTH = 100


@dataclass(frozen=True)
class Public:
    """An object of the page, by its full name."""

    name: str

    @property
    def value(self) -> Any:
        """The object."""
        module, _, name = self.name.rpartition(".")
        return getattr(importlib.import_module(module), name)

    @property
    def members(self) -> tuple[str, ...]:
        """What the page shows of a class: ``MEMBERS``, or all its own that says what it does."""
        if self.name in MEMBERS or not inspect.isclass(self.value):
            return MEMBERS.get(self.name, ())
        own = {key: each for key, each in vars(self.value).items() if key[0] != "_"}
        return tuple(
            key
            for key, each in own.items()
            if (inspect.isroutine(each) or _is_computed(each)) and _line(each)
        )

    def mark(self) -> str:
        """What the site is to show of it."""
        shown = MEMBERS.get(self.name)
        return self.name if shown is None else f"{self.name} {','.join(shown) or '-'}"

    def block(self) -> str:
        """As in a stub file."""
        name, value = self.name.rpartition(".")[2], self.value
        if not inspect.isclass(value):
            return _function(name, value)
        base = f"({value.__bases__[0].__name__})" if issubclass(value, Exception) else ""
        lines = [f"class {name}{base}:", f'    """{_line(value)}"""']
        made = "" if name in MADE_BY_OURS else _made(value)
        for part in filter(None, [made, *(_member(value, each) for each in self.members)]):
            lines += ["", *(f"    {line}" for line in part.splitlines())]
        return "\n".join(lines)


def publics() -> list[str]:
    """Full names of ``hybridtrain.__all__``, classes first, without the version."""
    found = [f"hybridtrain.{name}" for name in hybridtrain.__all__ if not name.startswith("__")]
    return sorted(found, key=lambda name: (not inspect.isclass(Public(name).value), name))


def page() -> str:
    """The text of docs/api.md."""
    sections = {name.rpartition(".")[2]: ("hybridtrain", [Public(name)]) for name in publics()}
    for title, (module, names) in SECTIONS.items():
        sections[title] = module, [Public(f"{module}.{name}") for name in names]
    return "\n".join([HEAD, *(_section(title, *each) for title, each in sections.items())])


def _section(title: str, module: str, shown: Sequence[Public]) -> str:
    names = ", ".join(each.name.rpartition(".")[2] for each in shown)
    line = f"from {module} import {names}"
    if len(line) > _WIDTH:
        line = f"from {module} import (\n    {names},\n)"
    code = "\n\n\n".join([line, *(each.block() for each in shown)])
    begin = f"<!-- api: {'; '.join(each.mark() for each in shown)} -->"
    return f"## {title}\n\n{begin}\n```pyi\n{code}\n```\n<!-- end of api -->\n"


# ---- stubs ---------------------------------------------------------------------------------------


def _is_computed(value: Any) -> bool:
    return isinstance(value, property) or (hasattr(value, "func") and not callable(value))


def _made(cls: Any) -> str:
    """``__init__``, or the fields of a dataclass; empty: it takes no arguments."""
    if dataclasses.is_dataclass(cls):
        hints = _hints(cls)
        signature = inspect.signature(cls).parameters.values()
        return "\n".join(_arguments(list(signature), hints))
    if cls.__init__ is object.__init__ or getattr(cls, "_is_protocol", False):
        return ""
    if issubclass(cls, Exception):
        return ""
    return _function("__init__", cls.__init__)


def _member(cls: type, name: str) -> str:
    if name in ATTRIBUTES:
        return ATTRIBUTES[name]
    value = inspect.getattr_static(cls, name)
    if not _is_computed(value):
        kind = type(value).__name__
        above = f"@{kind}\n" if kind in ("classmethod", "staticmethod") else ""
        return above + _function(name, getattr(value, "__func__", value))
    function = value.fget if isinstance(value, property) else value.func
    said = _type(_hints(function).get("return", Any))
    return f'@property\ndef {name}(self) -> {said}:\n    """{_line(value)}"""'


def _function(name: str, function: Callable[..., Any]) -> str:
    hints = _hints(function)
    signature = list(inspect.signature(function).parameters.values())
    end = f" -> {_type(hints['return'])}:" if "return" in hints else ":"
    head = _folded(f"def {name}", list(_arguments(signature, hints)), end)
    said = _line(function)
    return f'{head}\n    """{said}"""' if said and name != "__init__" else f"{head} ..."


def _folded(begin: str, arguments: list[str], end: str) -> str:
    """On one line, or one argument per line."""
    line = f"{begin}({', '.join(arguments)}){end}"
    if len(line) <= _WIDTH:
        return line
    return "\n".join([f"{begin}(", *(f"    {each}," for each in arguments), f"){end}"])


def _arguments(signature: Sequence[inspect.Parameter], hints: dict[str, Any]) -> Iterator[str]:
    """Each argument with type and default; the keys of ``**options`` one by one."""
    keyword_only = False
    for each in signature:
        match each.kind:
            case inspect.Parameter.VAR_POSITIONAL:
                keyword_only = True
                said = f": {_type(hints[each.name])}" if each.name in hints else ""
                yield f"*{each.name}{said}"
            case inspect.Parameter.VAR_KEYWORD:
                options = _options(hints.get(each.name))
                if options and not keyword_only:
                    yield "*"
                yield from options or [f"**{each.name}: {_type(hints.get(each.name, Any))}"]
            case _:
                if each.kind is inspect.Parameter.KEYWORD_ONLY and not keyword_only:
                    keyword_only = True
                    yield "*"
                said = f": {_type(hints[each.name])}" if each.name in hints else ""
                yield f"{each.name}{said}{_default(each.default, bool(said))}"


def _options(hint: Any) -> list[str]:
    """The keys of the TypedDict behind ``Unpack``."""
    if typing.get_origin(hint) is not typing.Unpack:
        return []
    (keys,) = typing.get_args(hint)
    return [
        f"{name}: {_type(kind)}{_default(DEFAULTS.get(name, ...), True)}"
        for name, kind in typing.get_type_hints(keys).items()
    ]


def _default(value: Any, typed: bool) -> str:
    if value is inspect.Parameter.empty:
        return ""
    if isinstance(value, enum.Enum) or not isinstance(
        value, str | int | float | bool | tuple | type(None)
    ):
        value = ...
    shown = "..." if value is ... else repr(value).replace("'", '"')
    return f" = {shown}" if typed else f"={shown}"


def _hints(function: Any) -> dict[str, Any]:
    """Types without the limits of their values; as text where a name is for type checkers only."""
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError):
        return dict(getattr(function, "__annotations__", {}))


def _type(hint: Any) -> str:
    text = hint if isinstance(hint, str) else inspect.formatannotation(hint)
    text = re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", text)
    text = re.sub(r"Optional\[((?:[^][]|\[[^][]*\])*)\]", r"\1 | None", text)
    while (found := re.search(r"\bUnion\[((?:[^][]|\[[^][]*\])*)\]", text)) is not None:
        parts = re.split(r", (?![^[]*\])", found[1])
        text = text[: found.start()] + " | ".join(parts) + text[found.end() :]
    text = text.replace("NoneType", "None").replace("'", '"')
    return text.replace(_NAMED, "Named").replace("~", "")


def _line(value: Any) -> str:
    """The sentences that the docstring begins with, about a line of them."""
    said = re.split(r"\n\n|:\n", inspect.getdoc(value) or "")[0]
    said = re.sub(r":\w+:`~[\w.]*?(\w+)`", r"`\1`", " ".join(said.split()))
    said = re.sub(r":\w+:`(?:hybridtrain\.)?([\w.]+)`", r"`\1`", said).replace("``", "`")
    first, *more = re.split(r"(?<=\.) ", said)
    for each in more:
        if len(first) + len(each) > _WIDTH:
            break
        first += f" {each}"
    return first


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
