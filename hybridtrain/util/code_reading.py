"""What users' functions do with certain objects, as far as their source tells.

A *watched* object is a parameter of a function that has a role. Code is harmless if a watched
object appears in it only as ``OBJECT.NAME``, with names that its role allows, and if nothing that
the code knows by name, or keeps of where it was made, leads to what must not be touched. Functions
that it calls by name are read as well; nobody hands them a watched object, as that alone is not
harmless. Where there is no source, or another one than the code was made of, nothing is.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType, ModuleType
from typing import Any

STANDARD_LIBRARY = frozenset(sys.stdlib_module_names)
# Ways to any object at all.
_ANYWHERE = {
    "__closure__",
    "__self__",
    "_getframe",
    "eval",
    "exec",
    "gc",
    "globals",
    "inspect",
    "locals",
}
Roles = Mapping[str, str]  # of a function's parameters, by their names


@dataclass
class CodeReader:
    """Reads functions.

    Args:
        allowed: the harmless names of each role.
        ways: role and name of what has a role itself, as a module's trainer has.
        leads: whether an object leads to what must not be touched.
        libraries: top-level packages whose code is not read, and harmless.
        owner: whose methods are read: its own attributes are looked at as objects.
    """

    allowed: Mapping[str, Collection[str]]
    ways: Mapping[tuple[str, str], str]
    leads: Callable[[object], bool]
    libraries: Collection[str]
    owner: object = None
    _found: dict[tuple[CodeType, tuple[tuple[str, str], ...]], bool] = field(default_factory=dict)

    def is_harmless(self, function: Any, roles: Roles) -> bool:
        """Whether the function and those that it calls are, with these roles of its parameters."""
        inner = self._unwrapped(function)
        if inner is None:
            return False
        key = inner.__code__, tuple(sorted(roles.items()))
        if key not in self._found:
            self._found[key] = True  # as far as it calls itself
            tree = source_of(inner)
            harmless = tree is not None and self._uses(tree, roles) and self._knows(inner)
            self._found[key] = harmless
        return self._found[key]

    def functions_of(self, kind: type) -> Iterator[FunctionType]:
        """All that users have written of a class and those above it."""
        for each in kind.__mro__:
            if not self.is_library(each):
                yield from functions_in(vars(each).values())

    def is_library(self, value: object) -> bool:
        """Whether a class, function or module comes from one."""
        name = getattr(value, "__name__" if isinstance(value, ModuleType) else "__module__", None)
        return (name or "").partition(".")[0] in self.libraries

    def _unwrapped(self, function: Any) -> FunctionType | None:
        """What decorators of libraries have wrapped."""
        while isinstance(function, FunctionType) and hasattr(function, "__wrapped__"):
            made_in = str(function.__globals__.get("__name__", ""))
            if made_in.partition(".")[0] not in self.libraries:
                return None
            function = function.__wrapped__
        return function if isinstance(function, FunctionType) else None

    # ---- what is done with watched objects ------------------------------------------------------

    def _uses(self, tree: ast.AST, roles: Roles) -> bool:
        """Whether all uses of what has a role are harmless."""
        fine: set[int] = set()  # nodes that stand before an allowed name
        nodes = list(ast.walk(tree))
        for node in nodes:
            if isinstance(node, ast.Attribute) and (role := self._role(node.value, roles)):
                known = node.attr in self.allowed[role] or (role, node.attr) in self.ways
                if not known and not self._is_own(node, roles):
                    return False
                fine.add(id(node.value))
        watched = (node for node in nodes if self._role(node, roles) is not None)
        return all(id(node) in fine for node in watched)

    def _role(self, node: ast.AST, roles: Roles) -> str | None:
        if isinstance(node, ast.Name):
            return roles.get(node.id)
        if isinstance(node, ast.Attribute) and (role := self._role(node.value, roles)):
            return self.ways.get((role, node.attr))
        return None

    def _is_own(self, node: ast.Attribute, roles: Roles) -> bool:
        """Whether it is a harmless attribute of the owner: ``self.NAME``."""
        owned = isinstance(node.value, ast.Name) and node.value.id == "self"
        if self.owner is None or not owned:
            return False
        value = inspect.getattr_static(self.owner, node.attr, None)
        value = getattr(value, "__func__", value)
        if isinstance(node.ctx, ast.Store):
            kept = None if value is not None else getattr(self.owner, node.attr, None)
            return not isinstance(value, property) and not self.leads([value, kept])
        if isinstance(value, FunctionType | property):
            read = value.fget if isinstance(value, property) else value
            return not self.is_library(read) and self.is_harmless(read, roles)
        known = node.attr in vars(self.owner) and not self.leads(value)
        return known and self._is_kept_harmless(node.attr, roles)

    def _is_kept_harmless(self, name: str, roles: Roles) -> bool:
        """Whether no method of the owner that is still to run may keep something else there."""
        methods = self.functions_of(type(self.owner))
        using = (each for each in methods if name in _names_of(each.__code__))
        return all(each.__name__ == "__init__" or self.is_harmless(each, roles) for each in using)

    # ---- what the code knows --------------------------------------------------------------------

    def _knows(self, function: FunctionType) -> bool:
        """Whether nothing leads anywhere that it names, or has kept of where it was made."""
        names = _names_of(function.__code__)
        if names & _ANYWHERE:
            return False
        values = [function.__globals__[name] for name in names if name in function.__globals__]
        values += [*filled_cells(function), *(function.__defaults__ or ())]
        return all(map(self._is_harmless_value, values))

    def _is_harmless_value(self, value: object) -> bool:
        match value:
            case FunctionType():
                return self.is_library(value) or self.is_harmless(value, {})
            case type():
                return all(self.is_harmless(each, {}) for each in self.functions_of(value))
            case ModuleType():
                return self.is_library(value)
        return not self.leads(value)


def functions_in(values: Iterable[object]) -> Iterator[FunctionType]:
    """The functions among them, those behind properties, class and static methods included."""
    for value in values:
        parts = (value.fget, value.fset) if isinstance(value, property) else (value,)
        for part in parts:
            function = getattr(part, "__func__", part)
            if isinstance(function, FunctionType):
                yield function


def source_of(function: FunctionType) -> ast.AST | None:
    """The definition, if it is there and the code was made of it; ``None`` for a lambda."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef):
        return None
    return tree.body[0] if _names_of(function.__code__) <= _named_in(tree) else None


def _names_of(code: CodeType) -> set[str]:
    return {name for part in codes_of(code) for name in part.co_names}


def _named_in(tree: ast.AST) -> set[str]:
    """All names in a source: variables, attributes, what is imported, and what a class defines."""
    found = {"__name__", "__module__", "__qualname__"}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.FunctionDef(name=name):
                found.add(name)
            case ast.ImportFrom(module=name, names=aliases):
                found |= {name or "", *(alias.name for alias in aliases)}
            case ast.Import(names=aliases):
                found |= {alias.name for alias in aliases}
    return found


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """The code and that of functions and comprehensions inside."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_of(constant)


def filled_cells(function: FunctionType) -> Iterator[Any]:
    """What the function has kept of the one that made it."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
