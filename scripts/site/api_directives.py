"""For the reference: whole docstrings in the place of the stubs of docs/api.md."""

from __future__ import annotations

import re
from typing import Any

_BLOCK = re.compile(r"<!-- api: (.*?) -->\n.*?<!-- end of api -->", re.DOTALL)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace each block by mkdocstrings' directives; mkdocs calls this for each page."""
    return _BLOCK.sub(_directives, markdown) if page.file.src_uri == "api.md" else markdown


def _directives(block: re.Match[str]) -> str:
    return "\n\n".join(map(_directive, block[1].split("; ")))


def _directive(mark: str) -> str:
    """``hybridtrain.Server run,save``: these members; ``-``: none; else all that it has."""
    name, _, members = mark.partition(" ")
    lines = [f"::: {name}", "    options:", "      heading_level: 3"]
    if members:
        lines.append(f"      members: [{members.strip('-').replace(',', ', ')}]")
    return "\n".join(lines)
