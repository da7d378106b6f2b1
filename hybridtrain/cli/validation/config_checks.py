"""Check types, ranges and contradictions of a configuration. Raises UserError with one line.

The checks run before any process starts and without importing torch. Types and ranges are declared
in :mod:`hybridtrain.cli.validation.run_options`, :mod:`hybridtrain.options.strategy_arguments` and
by the parameters of policies and exchanges. Arguments of classes must have their default's type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridtrain.cli import hydra_config
from hybridtrain.cli.explain import STRATEGY, base_config, closest
from hybridtrain.cli.validation.run_options import Group, RunOptions, TaskOptions, TrainerOptions
from hybridtrain.errors import UserError
from hybridtrain.options.exchange_options import EXCHANGE_OPTIONS
from hybridtrain.options.strategy_arguments import checked
from hybridtrain.policies import POLICIES, make_policy
from hybridtrain.testing.faults import check_workers, read_faults
from hybridtrain.util.named_choice import checked_choice
from hybridtrain.util.option_types import allows, check, hints, is_target, refusal, shown

OPEN = ("model", "data", "optimizer", "callbacks", "logger")  # groups of arguments of classes


def check_config(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Run all checks that need neither this machine's hardware nor torch."""
    if "model" in cfg and OmegaConf.is_dict(cfg.model):
        check_complete(cfg)
    given = _plain(cfg)
    _check_keys(given, RunOptions, "")
    _check_keys(given["task"], TaskOptions, "task.")
    _check_keys(given["trainer"], TrainerOptions, "trainer.")
    check_types(cfg, overrides)
    if given["strategy"].get("_target_") == STRATEGY:
        _check_strategy({k: v for k, v in given["strategy"].items() if k != "_target_"})
    _check_together(given)


def check_complete(cfg: DictConfig) -> None:
    """Check that the user's own module is named, the only key without a default."""
    if OmegaConf.is_missing(cfg.model, "_target_"):
        raise UserError(
            "model=own needs a module: give model._target_=package.Class, your LightningModule "
            "(model.NAME=VALUE for its arguments), and data._target_=package.Class unless it has "
            "dataloaders of its own"
        )


def _plain(node: Any, prefix: str = "") -> Any:
    """The node as plain values, without those known only in the running job."""
    if not OmegaConf.is_dict(node):
        return node
    return {
        str(name): _plain(_resolved(node, name, f"{prefix}{name}"), f"{prefix}{name}.")
        for name in node
        if not OmegaConf.is_missing(node, name) and not _of_job(node, name)
    }


def _resolved(node: DictConfig, name: Any, key: str) -> Any:
    try:
        value = node[name]
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_list(value) else value
    except OmegaConfBaseException as error:
        given: Any = OmegaConf.to_container(node, resolve=False)
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{key}={shown(given[name])} was given, which cannot be resolved: {reason}"
        ) from error


def _of_job(node: DictConfig, name: Any) -> bool:
    """Whether the value interpolates ``${run_dir}`` or ``${hydra:}``, known only in the job."""
    raw = node._get_node(name)
    text = str(raw._value()) if raw is not None and OmegaConf.is_interpolation(node, name) else ""
    return "run_dir" in text or "hydra:" in text


def _check_keys(given: Mapping[str, Any], described: type, prefix: str) -> None:
    """Check that declared keys have values of their types, and that groups have no others."""
    kinds = hints(described)
    for name, kind in kinds.items():
        if name in given:
            check(prefix + name, given[name], kind, plain=True)
        elif name not in ("run_dir", "default_root_dir"):
            raise UserError(f"{prefix}{name} is not there, and every run has it; do not remove it")
    for name in given:
        if prefix and name not in kinds and not name.startswith("_"):
            raise UserError(f"{prefix}{name}: there is no such option{closest(name, kinds)}")


def _check_strategy(given: Mapping[str, Any]) -> None:
    made = checked(given, "strategy.", plain=True)
    policy, exchange = given.get("policy", "hybrid"), made["exchange"]
    if not is_target(policy):
        checked_choice("strategy.policy", policy, POLICIES, plain=True)
        make_policy(policy)
    if exchange is not None and not is_target(exchange):
        checked_choice("strategy.exchange", exchange, EXCHANGE_OPTIONS, plain=True)


def _check_together(given: Mapping[str, Any]) -> None:
    """Refuse options that contradict each other; raises UserError."""
    trainer, strategy, devices = given["trainer"], given["strategy"], given["trainer"]["devices"]
    if given["test_only"] and given["ckpt"] is None:
        raise UserError("test_only=true: name the checkpoint to test with ckpt=PATH")
    if given["profile"] and trainer["profiler"] is not None:
        raise UserError(
            f"profile=true was given together with trainer.profiler={trainer['profiler']}; a "
            "trainer has one profiler: leave one of them out"
        )
    if isinstance(devices, list) and (not devices or len(set(devices)) < len(devices)):
        raise UserError(f"trainer.devices={devices}: name GPUs, and each of them once, as in [0,2]")
    faults = read_faults(given["faults"])
    if faults and "faults" not in strategy:
        raise UserError(
            f"faults={given['faults']} was given, but strategy {strategy.get('_target_')} cannot "
            "be disturbed on purpose; use one whose parameters live in host memory "
            "(strategy=hybrid, async, backup ...)"
        )
    if devices == "auto" or strategy.get("_target_") != STRATEGY:
        return
    n_devices = len(devices) if isinstance(devices, list) else devices
    n_workers = n_devices * strategy["workers_per_device"]
    make_policy(strategy["policy"]).begin(n_workers)
    check_workers(read_faults(strategy["faults"]), n_workers)


# ---- arguments of classes -----------------------------------------------------------------------


def check_types(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Check that a typed value has the type of the value that it replaces."""
    parsed = hydra_config.parse(overrides)
    keys = [x.key_or_group for x in parsed if not x.is_delete() and "." in x.key_or_group]
    keys = [x for x in keys if x.partition(".")[0] in OPEN and not x.endswith("._target_")]
    for key in keys:
        old, new = _value(base_config(parsed), key), _value(cfg, key)
        if old is not None and new is not None:
            _check_type(key, old, new)


def _value(cfg: DictConfig, key: str) -> Any:
    """The value; None if it is missing or known only in the running job."""
    return OmegaConf.select(cfg, key, throw_on_missing=False, throw_on_resolution_failure=False)


def _check_type(key: str, old: Any, new: Any) -> None:
    kinds = {bool: bool, int: int, float: float | Sequence[float], DictConfig: Group}
    kind: Any = {**kinds, ListConfig: list}.get(type(old), Any)
    plain = OmegaConf.to_container(new, resolve=True) if OmegaConf.is_config(new) else new
    if kind is int and isinstance(plain, float) and plain.is_integer():
        return  # 1e3
    if not allows(plain, kind, plain=True):
        such = OmegaConf.to_container(old) if OmegaConf.is_config(old) else old
        raise UserError(f"{refusal(key, plain, kind)}, such as {shown(such)}")
