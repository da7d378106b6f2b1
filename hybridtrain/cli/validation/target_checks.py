"""Check and instantiate the classes that a configuration names.

Every ``_target_`` must exist and take its arguments: a misspelt one is one line here, and would be
a traceback through Hydra later. Arguments of library classes must have the declared types; a user's
class checks its own.
"""

from __future__ import annotations

import inspect
import pkgutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError

from hybridtrain.cli.explain import STRATEGY, one_line
from hybridtrain.engine.options.strategy_arguments import check_sizes
from hybridtrain.errors import UserError
from hybridtrain.lightning_package import decide_by_configuration
from hybridtrain.util.option_types import check, check_arguments, hint, hints, shown
from hybridtrain.util.own_parts import load_target

_HYDRAS_OWN = ("_target_", "_args_", "_convert_", "_partial_", "_recursive_")


def check_targets(cfg: DictConfig) -> None:
    """Check that every ``_target_`` exists and takes its arguments."""
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
    target = load_target(key, name)
    if key == "strategy.update":
        from hybridtrain.engine.updates.named import refuse_optimizer  # it needs torch

        refuse_optimizer(name)
    given = [str(x) for x in node if x not in _HYDRAS_OWN]
    values = {name: value for name, value in _given_values(node) if name in given}
    if _is_library(name):
        check_arguments(target, values, f"{key}.", plain=True)
    else:
        _check_numbers(key, target, values)
    parameters = _parameters(target, given)
    if parameters is None:
        return
    for word in given:
        if word not in parameters:
            raise UserError(
                f"{key}.{word}: {name} takes no argument {word!r}{hint(word, parameters)}. "
                f"It takes {', '.join(parameters) or 'none'}."
            )
    required = [x for x, p in parameters.items() if p.default is p.empty and x not in given]
    if required and not node.get("_partial_") and "_args_" not in node:
        raise UserError(f"{key}: {name} also needs {', '.join(f'{key}.{x}' for x in required)}")


def _check_numbers(key: str, target: Callable[..., Any], values: Mapping[str, Any]) -> None:
    """Check that numbers are given where the user's class declares some; raises UserError."""
    for name, value in values.items():
        kind = hints(target).get(name, Any)
        kinds = {*get_args(kind)} if get_origin(kind) in (Union, UnionType) else {kind}
        if kinds <= {int, float, NoneType} and isinstance(value, str | float):
            check(f"{key}.{name}", value, kind, plain=True)


def _blamed(target: Callable[..., Any], values: Mapping[str, Any]) -> str | None:
    """The first argument that is text where its default is a number, in words."""
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return None
    for name, value in values.items():
        default = parameters[name].default if name in parameters else None
        if isinstance(value, str) and isinstance(default, int | float):
            return f".{name}={shown(value, plain=True)} was given, whose default is {default}"
    return None


def _given_values(node: DictConfig) -> Iterator[tuple[str, Any]]:
    """The arguments of a node that can be resolved, as plain values."""
    for name in node:
        with suppress(InterpolationResolutionError):
            value = node[name]
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
            yield str(name), value


# A class that takes any argument hands those that it does not name over to another.
_HANDS_ON_TO = {"TensorBoardLogger": "torch.utils.tensorboard.SummaryWriter"}


def _parameters(
    target: Callable[..., Any], given: Sequence[str]
) -> dict[str, inspect.Parameter] | None:
    """Named parameters of ``target``; None if it takes any, or has no signature."""
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {k: p for k, p in parameters.items() if p.kind in by_name}
    if all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
        return named
    other = _HANDS_ON_TO.get(getattr(target, "__name__", ""))
    if other is None or named.keys() >= set(given):
        return None
    return named | (_parameters(pkgutil.resolve_name(other), given) or {})


# ---- instantiation ------------------------------------------------------------------------------

_LIBRARIES = ("hybridtrain", "pytorch_lightning", "torch", "torchmetrics")


def _is_library(name: str) -> bool:
    return name.partition(".")[0] in _LIBRARIES


def made(key: str, node: DictConfig, kind: type, **parts: Any) -> Any:
    """Instantiate a ``_target_`` with its arguments and ``parts``.

    Raises:
        UserError: if a library's class refuses its arguments, a user's class one that is text where
            the default is a number, or the object is no ``kind``.
        Exception: any exception of a user's own class.
    """
    if node.get("_target_") is None:
        raise UserError(f"{key}._target_=null was given; give package.Class")
    name = str(node["_target_"])
    try:
        thing = instantiate(node, _partial_=True, _convert_="all")(**parts)
    except (UserError, ModuleNotFoundError):
        raise
    except Exception as error:  # TypeError, ValueError, MisconfigurationException ...
        values = dict(_given_values(node))
        if not _is_library(name):
            if (blamed := _blamed(load_target(key, name), values)) is None:
                raise
            raise UserError(f"{key}{blamed}: {name} refused it: {one_line(error)[:300]}") from error
        raise UserError(f"{key}: {name} refused its options: {one_line(error)[:300]}") from error
    if not isinstance(thing, kind):
        raise UserError(f"{key}._target_={name} is no {kind.__name__}")
    return thing


def check_scheme(cfg: DictConfig) -> None:
    """See that the strategy's parts go with each other and with the number of workers.

    It makes the strategy and its server as a run does; model and data are not looked at. Nothing is
    checked where another strategy is chosen, or only the job will know the number of devices.
    """
    devices = cfg.trainer.devices
    if cfg.strategy.get("_target_") != STRATEGY or devices == "auto":
        return
    decide_by_configuration(cfg)
    import torch

    from hybridtrain.engine.scheme import check_parts, make_server
    from hybridtrain.engine.server.server import ParameterServer
    from hybridtrain.lightning.strategy import HybridStrategy

    whole = deepcopy(cfg)
    OmegaConf.update(whole, "strategy.record", None, force_add=True)  # a path that the job knows
    n_devices = devices if isinstance(devices, int) else len(devices)
    places = [torch.device("cpu")] * n_devices
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheme = made("strategy", whole.strategy, HybridStrategy, parallel_devices=places)
        scheme.begin_run()
        check_sizes(scheme.data_options["batch_size_per_worker"], scheme.world_size)
        check_parts(scheme)
        make_server(scheme, 1, ParameterServer)
