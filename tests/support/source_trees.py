"""Source files as syntax trees, each parsed once in a session. No test may change them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree(path)))


@cache
def calls(path: Path) -> dict[ast.Call, str]:
    """With what each calls, as it is written."""
    return {node: ast.unparse(node.func) for node in nodes(path) if isinstance(node, ast.Call)}
