"""The tables of options in docs/configuration.md, from the description of the options.

``python -m tests.cli.option_tables`` writes them anew.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hybridtrain import HybridStrategy
from hybridtrain.cli.hydra_config import compose_config, conf_dir
from hybridtrain.cli.validation.config_checks import RunOptions, TaskOptions, TrainerOptions
from hybridtrain.options.exchange_options import EXCHANGE_OPTIONS
from hybridtrain.options.strategy_arguments import DEFAULTS, StrategyArguments
from hybridtrain.policies import POLICIES
from hybridtrain.util.option_types import Named, hints, words

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
_ENTRY = re.compile(r"^    (\w+): (.*(?:\n {8,}.*)*)", re.MULTILINE)
_ROLE = re.compile(r":\w+:`[~.\w]*?(\w+)`")


def texts(described: Any) -> dict[str, str]:
    """What a docstring says of each argument, in one line."""
    entries = _ENTRY.findall(inspect.cleandoc(described.__doc__ or "").partition("Args:\n")[2])
    return {
        name: _ROLE.sub(r"`\1`", " ".join(text.split())).replace("``", "`")
        for name, text in entries
    }


def allowed(kind: Any) -> str:
    """What a value may be, as a cell."""
    text = words(kind).replace(", or an object", "").replace(", an object", "")
    return (
        text.replace("text, a mapping", "text or a mapping") if text.endswith("mapping") else text
    )


def yaml(value: Any) -> str:
    """A default, as a cell."""
    plain = {None: "null", True: "true", False: "false", (): "null"}
    text = (
        plain[value] if value is None or value is True or value is False or value == () else value
    )
    return f"`{text}`"


def strategy_rows() -> Iterator[list[str]]:
    said, kinds = texts(HybridStrategy), {"policy": Named, **hints(StrategyArguments)}
    for name, default in {"policy": "hybrid", **DEFAULTS}.items():
        yield [f"`{name}`", yaml(default), allowed(kinds[name]), said[name]]


def part_rows(known: Mapping[str, Callable[..., Any]]) -> Iterator[list[str]]:
    for part, make in known.items():
        kinds = hints(make)
        for name, parameter in inspect.signature(make).parameters.items():
            yield [f"`{part}`", f"`{name}`", yaml(parameter.default), allowed(kinds[name])]


def config_rows(described: Any, group: str = "") -> Iterator[list[str]]:
    said = texts(described)
    values: Any = compose_config(["++run_dir=."])
    if group:
        values = OmegaConf.load(conf_dir() / group / "default.yaml") if group == "trainer" else {}
    for name, kind in hints(described).items():
        value = OmegaConf.to_container(values, resolve=False).get(name, {}) if values else {}
        default = (
            "" if isinstance(value, Mapping) or "run_dir" in str((name, value)) else yaml(value)
        )
        key = f"`{group}.{name}`" if group else f"`{name}`"
        yield [key, default, allowed(kind), *([said[name]] if said else [])]


def table(head: str, rows: Iterator[list[str]]) -> str:
    lines = [head, "|" + " --- |" * (head.count("|") - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def tables() -> dict[str, str]:
    """By the name that stands in their markers."""
    task = config_rows(TaskOptions, "task")
    return {
        "run": table(
            "| option | default | allowed | meaning |", iter([*config_rows(RunOptions), *task])
        ),
        "strategy": table("| option | default | allowed | meaning |", strategy_rows()),
        "policy": table("| policy | parameter | default | allowed |", part_rows(POLICIES)),
        "exchange": table(
            "| exchange | parameter | default | allowed |", part_rows(EXCHANGE_OPTIONS)
        ),
        "trainer": table("| option | default | allowed |", config_rows(TrainerOptions, "trainer")),
    }


def renewed(text: str) -> str:
    """The page with the tables as they are to be."""
    for name, content in tables().items():
        begin, end = f"<!-- options of {name} -->\n", f"\n<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        assert rest, f"no marker for the table of {name}"
        text = before + begin + content + end + rest.partition(end)[2]
    return text


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
