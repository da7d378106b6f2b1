"""The classes a configuration names, before any of them is made.

Every ``_target_`` has to exist and to take the arguments it is given; a missing or misspelt one is
one line here, and a traceback through Hydra later.
"""

from __future__ import annotations

import importlib.util
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hybridtrain.cli.explain import closest, one_line
from hybridtrain.errors import UserError


def check_targets(cfg: DictConfig) -> None:
    """Every ``_target_`` exists and takes the arguments it is given."""
    for key, node in _targets(cfg, ""):
        _check_target(key, node)


def _targets(node: Any, path: str) -> Iterator[tuple[str, DictConfig]]:
    if not isinstance(node, DictConfig):
        return
    if node.get("_target_") is not None:
        yield path, node
    for name in map(str, node):
        if not OmegaConf.is_missing(node, name) and not OmegaConf.is_interpolation(node, name):
            yield from _targets(node[name], f"{path}.{name}" if path else name)


def _check_target(key: str, node: DictConfig) -> None:
    name = str(node["_target_"])
    target = _load(key, name)
    given = [str(x) for x in node if not str(x).startswith("_")]
    parameters = _parameters(target)
    if parameters is None:
        return
    for word in given:
        if word not in parameters:
            raise UserError(
                f"{key}.{word}: {name} takes no argument {word!r}{closest(word, parameters)} "
                f"It takes {', '.join(parameters) or 'none'}."
            )
    required = [x for x, p in parameters.items() if p.default is p.empty and x not in given]
    if required and not node.get("_partial_") and "_args_" not in node:
        raise UserError(f"{key}: {name} also needs {', '.join(f'{key}.{x}' for x in required)}")


def _load(key: str, name: str) -> Callable[..., Any]:
    if "." in name:
        top = name.split(".")[0]
        if importlib.util.find_spec(top) is None:
            raise UserError(f"{key}._target_={name}: there is no module {top!r} to import")
    try:
        found = pkgutil.resolve_name(name)
    except ModuleNotFoundError:
        raise  # a package that is missing inside an existing module has its own line
    except Exception as error:
        reason = one_line(error)
        raise UserError(f"{key}._target_={name} cannot be imported: {reason}") from error
    if not callable(found):
        raise UserError(f"{key}._target_={name} is not a class or function")
    return found


def _parameters(target: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    """Named parameters of ``target``; None when it takes any, or does not tell."""
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return None
    if any(x.kind is x.VAR_KEYWORD for x in parameters.values()):
        return None
    return {
        k: p for k, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY)
    }
