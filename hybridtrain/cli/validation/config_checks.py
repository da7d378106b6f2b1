"""What the values of a configuration have to be like. Raises UserError with one line.

Cheap questions, asked before any process starts and without importing torch: do the values typed
have the type of those they replace, and are the trainer's numbers in range.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from hybridtrain.cli import hydra_config
from hybridtrain.cli.explain import base_config
from hybridtrain.errors import UserError
from hybridtrain.policies import make_policy
from hybridtrain.testing.faults import check_workers, read_faults
from hybridtrain.util.number_checks import is_number

ACCELERATORS = ("auto", "cpu", "gpu", "cuda")
PRECISIONS = (
    *("32", "32-true", "64", "64-true", "16", "16-mixed", "16-true", "bf16", "bf16-mixed"),
    *("bf16-true", "transformer-engine", "transformer-engine-float16"),
)
# Numbers that may also be words, or the reverse; everything else keeps the type of its default.
FREE = {"trainer.devices", "trainer.overfit_batches", "trainer.fast_dev_run", "seed", "run_dir"}
FREE |= {"strategy.exchange.every"}  # a number, one for each worker, or what changes them

# Besides these at the top, only keys within a group have a type to keep.
TOP = ("seed", "test", "test_only", "profile", "ckpt")


def check_config(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Everything that can be told without this machine's hardware and without importing torch."""
    check_complete(cfg)
    check_types(cfg, overrides)
    check_trainer(cfg.trainer)
    check_policy(cfg)
    check_faults(cfg)
    if cfg.seed is not None and (not isinstance(cfg.seed, int) or cfg.seed < 0):
        raise UserError(f"seed={cfg.seed}: give a whole number of at least 0, or null")
    if cfg.test_only and cfg.ckpt is None:
        raise UserError("test_only=true: name the checkpoint to test with ckpt=PATH")


def check_complete(cfg: DictConfig) -> None:
    """A module of the user's own is named: all else has a default."""
    if OmegaConf.is_missing(cfg.model, "_target_"):
        raise UserError(
            "model=own needs a module: give model._target_=package.Class, your LightningModule "
            "(model.NAME=VALUE for its arguments), and data._target_=package.Class unless it has "
            "dataloaders of its own"
        )


def check_policy(cfg: DictConfig) -> None:
    """The strategy's policy exists, and makes sense for so many workers, where that is known."""
    given: Any = cfg.strategy.get("policy")
    if given is None:
        return
    policy = make_policy(_plain(given))
    if (n_workers := _workers(cfg)) is not None:
        policy.begin(n_workers)


def check_faults(cfg: DictConfig) -> None:
    """What is to go wrong on purpose can, under this strategy and with so many workers."""
    if not cfg.faults:
        return
    if "faults" not in cfg.strategy:
        raise UserError(
            f"faults={_plain(cfg.faults)} was given, but strategy {cfg.strategy.get('_target_')} "
            "cannot be disturbed on purpose; use one whose parameters live in host memory "
            "(strategy=hybrid, async, backup ...)"
        )
    faults = read_faults(_plain(cfg.strategy.faults))
    if (n_workers := _workers(cfg)) is not None:
        check_workers(faults, n_workers)


def _plain(given: Any) -> Any:
    return OmegaConf.to_container(given) if OmegaConf.is_config(given) else given


def _workers(cfg: DictConfig) -> int | None:
    """How many, where that can be told without looking at the machine."""
    devices = cfg.trainer.devices
    n_devices = len(devices) if isinstance(devices, ListConfig) else devices
    if not isinstance(n_devices, int):
        return None
    return n_devices * int(cfg.strategy.get("workers_per_device") or 1)


def check_types(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """A value typed on the command line has the type of the one it replaces."""
    parsed = hydra_config.parse(overrides)
    keys = [x.key_or_group for x in parsed if not x.is_delete() and "." in x.key_or_group]
    keys += [x for x in TOP if _typed(parsed, x)]
    keys = [x for x in keys if not x.startswith(("hydra.", "hydra/")) and "/" not in x]
    if not keys:
        return
    base = base_config(parsed)
    for key in keys:
        _check_type(key, _value(base, key), _value(cfg, key))


def _value(cfg: DictConfig, key: str) -> Any:
    """The value, or None where there is none yet (missing, or known only to the running job)."""
    return OmegaConf.select(cfg, key, throw_on_missing=False, throw_on_resolution_failure=False)


def _typed(parsed: Sequence[Any], key: str) -> bool:
    return any(x.key_or_group == key for x in parsed)


def _check_type(key: str, old: Any, new: Any) -> None:
    number = is_number(new)
    if key in FREE or key.endswith("._target_") or old is None or new is None:
        return
    match old:
        case bool() if not isinstance(new, bool):
            raise UserError(f"{key}={new}: give true or false")
        case bool():
            return
        case int() if not number or (isinstance(new, float) and not new.is_integer()):
            raise UserError(f"{key}={new}: give a whole number, such as {old}")
        case float() if not number:
            raise UserError(f"{key}={new}: give a number, such as {old}")
        case ListConfig() if not isinstance(new, ListConfig):
            raise UserError(f"{key}={new}: give a list, such as {OmegaConf.to_container(old)}")
        case DictConfig() if not isinstance(new, DictConfig):
            raise UserError(f"{key}={new}: this is a group of keys, {', '.join(map(str, old))}")


def check_trainer(trainer: DictConfig) -> None:
    """The trainer's choices and numbers are ones Lightning knows."""
    _check_devices(trainer.devices)
    if trainer.accelerator not in ACCELERATORS:
        raise UserError(
            f"trainer.accelerator={trainer.accelerator}: choose one of {', '.join(ACCELERATORS)}"
        )
    if trainer.precision is not None and str(trainer.precision) not in PRECISIONS:
        raise UserError(
            f"trainer.precision={trainer.precision}: choose one of {', '.join(PRECISIONS)}"
        )
    for key, least in _LEAST.items():
        value = trainer.get(key)
        if value is not None and not (is_number(value) and value >= least):
            raise UserError(f"trainer.{key}={value}: give a number of at least {least}, or null")


_LEAST = {
    "max_epochs": -1,
    "min_epochs": 0,
    "max_steps": -1,
    "min_steps": 0,
    "num_nodes": 1,
    "accumulate_grad_batches": 1,
    "gradient_clip_val": 0,
    "log_every_n_steps": 0,
    "limit_train_batches": 0,
    "limit_val_batches": 0,
    "limit_test_batches": 0,
    "check_val_every_n_epoch": 1,
    "reload_dataloaders_every_n_epochs": 0,
}


def _check_devices(devices: Any) -> None:
    how = "give a number of at least 1, a list of GPU numbers such as [0,2], or auto"
    if any(name in str(devices) for name in ("MIG-", "GPU-")):
        how += "; CUDA_VISIBLE_DEVICES names GPUs and parts of them, numbered from 0 here"
    match devices:
        case "auto":
            return
        case bool():
            raise UserError(f"trainer.devices={str(devices).lower()}: {how}")
        case int() if devices >= 1:
            return
        case ListConfig() if len(devices) > 0 and len(set(devices)) == len(devices):
            if all(isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in devices):
                return
    more = " (all GPUs is auto)" if devices == -1 else ""
    raise UserError(f"trainer.devices={devices}: {how}{more}")
