"""The tables of options in docs/configuration.md and docs/reference*.md, from their descriptions.

``python -m tests.cli.option_tables`` writes them anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hybridtrain import HybridStrategy
from hybridtrain.cli.hydra_config import compose_config
from hybridtrain.cli.validation.config_checks import RunOptions, TaskOptions
from hybridtrain.engine.options.strategy_arguments import DEFAULTS, StrategyArguments
from hybridtrain.util.option_types import Named, hints
from tests.cli import reference_tables
from tests.cli.reference_tables import allowed, default, table, texts

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / "configuration.md", *sorted(DOCS.glob("reference*.md"))]


def strategy_rows() -> Iterator[list[str]]:
    said, kinds = texts(HybridStrategy), {"policy": Named, **hints(StrategyArguments)}
    for name, value in {"policy": "hybrid", **DEFAULTS}.items():
        yield [f"`{name}`", default(value), allowed(kinds[name]), said[name]]


def config_rows(described: Any, group: str = "") -> Iterator[list[str]]:
    said = texts(described)
    values: Any = {} if group else OmegaConf.to_container(compose_config(["++run_dir=."]))
    for name, kind in hints(described).items():
        value = values.get(name, {})
        cell = "" if isinstance(value, Mapping) or name == "run_dir" else default(value)
        yield [f"`{group}{name}`", cell, allowed(kind), said[name]]


@cache
def tables() -> dict[str, str]:
    """By the name that stands in their markers."""
    head = "| option | default | allowed | meaning |"
    run = [*config_rows(RunOptions), *config_rows(TaskOptions, "task.")]
    return {
        "run": table(head, iter(run)),
        "strategy": table(head, strategy_rows()),
        **reference_tables.tables(),
    }


def renewed(text: str) -> str:
    """The page with the tables as they are to be."""
    for name, content in tables().items():
        begin, end = f"<!-- options of {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        if rest:
            text = f"{before}{begin}{content}\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(renewed(page.read_text()))
