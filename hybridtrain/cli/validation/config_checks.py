"""Check types, ranges and contradictions of a configuration. Raises UserError with one line.

The checks run before any process starts and without importing torch. Types and ranges are declared
below, in :mod:`hybridtrain.engine.options.strategy_arguments` and by the parameters of policies and
exchanges. Arguments of classes must have the type of the value that is in the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridtrain.cli import config_values
from hybridtrain.cli.explain import STRATEGY, base_config
from hybridtrain.cli.further_host import number_of_hosts
from hybridtrain.cli.hydra_config import PARTS
from hybridtrain.engine.faults import check_workers, read_faults
from hybridtrain.engine.options.exchange_options import EXCHANGE_OPTIONS, INSIDE
from hybridtrain.engine.options.strategy_arguments import checked
from hybridtrain.engine.policies import POLICIES, check_no_scheme, make_policy
from hybridtrain.errors import UserError
from hybridtrain.util.option_types import (
    Finite,
    Natural,
    NotNegative,
    Part,
    Positive,
    Range,
    Share,
    ShareAbove0,
    Workers,
    allows,
    as_typed,
    check,
    checked_choice,
    hint,
    hints,
    is_target,
    refusal,
    shown,
)

# ---- types and ranges of the configuration's keys -----------------------------------------------
# :mod:`hybridtrain.engine.options.strategy_arguments` has the types of a strategy's keys; the
# classes of models, data, optimizers, callbacks and loggers declare theirs in their signatures.

Group = Mapping[str, Any]
Parts = Mapping[str, Mapping[str, Any] | None]  # by name; null removes one
FromMinus1 = Annotated[int, Range(-1)]  # -1: no limit
_DEVICES = "all GPUs is auto; CUDA_VISIBLE_DEVICES names GPUs and parts, numbered from 0"


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """The task.

    Args:
        name: of the task, in summaries.
        monitor: a logged metric by which the best checkpoint is kept; null: the latest is kept.
        mode: whether a small or a large value of it is good.
        metric: a logged metric that a sweep compares.
    """

    name: str
    monitor: str | None
    mode: Literal["min", "max"]
    metric: str | None


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Groups, and options of a run.

    Args:
        model: a LightningModule: `_target_` and its arguments.
        data: a LightningDataModule.
        optimizer: of the model.
        strategy: policy, exchange, update, and the options below.
        trainer: arguments of Lightning's `Trainer`.
        callbacks: by name.
        logger: by name.
        task: what is learnt.
        seed: of initial weights, order of samples, augmentation; null: another each
            time, but the same order.
        ckpt: a checkpoint to go on from, or to test; `last`: the newest whole one of this model.
        resume: the directory of a run to go on with; `auto`: the last unfinished one.
        resume_override: let resume=DIR go on with other options than the run had.
        test_only: test ckpt, train nothing.
        test: test the best checkpoint at the end, where the task has a test set.
        profile: measure where each worker's time goes.
        advice: say at the end if another strategy would have been faster, from the run's times.
        faults: what is to go wrong on purpose.
        run_dir: where the run writes; chosen with hydra.run.dir=DIR.
    """

    model: Group
    data: Group
    optimizer: Group
    strategy: Group
    trainer: Group
    callbacks: Parts
    logger: Parts
    task: Group
    seed: Annotated[int, Range(0, 2**32 - 1)] | None
    ckpt: str | None
    resume: str | None
    resume_override: bool
    test_only: bool
    test: bool
    profile: bool
    advice: bool
    faults: Sequence[Any] | None
    run_dir: str = "."


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """Types of Lightning's ``Trainer`` options, in the order of ``conf/trainer/default.yaml``."""

    accelerator: Literal["auto", "cpu", "gpu", "cuda"]
    devices: Annotated[Workers | Literal["auto"] | Sequence[Natural], _DEVICES]
    num_nodes: Workers
    precision: (
        Literal["32-true", "16-mixed", "bf16-mixed", "64-true", "bf16-true", "16-true"]
        | Literal["32", "16", "64", "bf16", 32, 16, 64]
        | Literal["transformer-engine", "transformer-engine-float16"]
        | None
    )
    max_epochs: FromMinus1 | None
    min_epochs: Natural | None
    max_steps: FromMinus1
    min_steps: Natural | None
    max_time: str | Mapping[str, Natural] | None
    accumulate_grad_batches: Positive
    gradient_clip_val: NotNegative | None
    gradient_clip_algorithm: Literal["norm", "value"] | None
    deterministic: bool | Literal["warn"] | None
    benchmark: bool | None
    detect_anomaly: bool
    sync_batchnorm: bool
    limit_train_batches: Natural | Share | None
    limit_val_batches: Natural | Share | None
    limit_test_batches: Natural | Share | None
    limit_predict_batches: Natural | Share | None
    overfit_batches: Natural | Share
    fast_dev_run: bool | Natural
    use_distributed_sampler: bool
    reload_dataloaders_every_n_epochs: Natural
    val_check_interval: Positive | ShareAbove0 | str | Mapping[str, Natural] | None
    check_val_every_n_epoch: Positive | None
    num_sanity_val_steps: FromMinus1 | None
    log_every_n_steps: Natural | None
    enable_checkpointing: bool | None
    enable_progress_bar: bool | None
    enable_model_summary: bool | None
    inference_mode: bool
    profiler: Literal["simple", "advanced", "pytorch", "xla"] | Part | None
    barebones: bool
    plugins: str | Sequence[Any] | Part | None
    enable_autolog_hparams: bool
    model_registry: str | None
    default_root_dir: str | None


OPEN = ("model", "data", "optimizer", "callbacks", "logger")  # groups of arguments of classes


def check_config(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Run all checks that need neither this machine's hardware nor torch."""
    own = "model" in cfg and OmegaConf.is_dict(cfg.model)
    if own and OmegaConf.is_missing(cfg.model, "_target_"):  # the only key without a default
        raise UserError(
            "model=own needs a module: give model._target_=package.Class, your LightningModule "
            "(model.NAME=VALUE for its arguments), and data._target_=package.Class unless it has "
            "dataloaders of its own"
        )
    given = _plain(cfg)
    _check_keys(given, RunOptions, "", cfg)
    _check_keys(given["task"], TaskOptions, "task.", cfg.task)
    _check_keys(given["trainer"], TrainerOptions, "trainer.", cfg.trainer)
    check_types(cfg, overrides)
    _check_optimizer_is_used(cfg, overrides)
    if given["strategy"].get("_target_") == STRATEGY:
        _check_strategy({k: v for k, v in given["strategy"].items() if k != "_target_"})
    else:
        _check_no_own_parts(given["strategy"])
    _check_together(given)


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


def _check_keys(given: Mapping[str, Any], described: type, prefix: str, whole: DictConfig) -> None:
    """Check that declared keys have values of their types, and that groups have no others.

    ``whole`` has, besides, the keys whose values only the running job knows.
    """
    kinds = hints(described)
    for name, kind in kinds.items():
        if name in given:
            check(prefix + name, given[name], kind, plain=True)
        elif name not in whole:
            raise UserError(f"{prefix}{name} is not there, and every run has it; do not remove it")
    for name in given:
        # Outside of the groups a key may be there for others to refer to.
        wrong = name not in kinds and (prefix or get_close_matches(name, kinds, cutoff=0.8))
        if wrong and not name.startswith("_"):
            raise UserError(f"{prefix}{name}: there is no such option{hint(name, kinds)}")


def _check_strategy(given: Mapping[str, Any]) -> None:
    made = checked(given, "strategy.", plain=True)
    policy, exchange = given.get("policy", "hybrid"), made["exchange"]
    if not is_target(policy):
        check_no_scheme("strategy.policy", policy)
        checked_choice("strategy.policy", policy, POLICIES, plain=True)
        make_policy(policy)
    if exchange is not None and not is_target(exchange):
        checked_choice("strategy.exchange", exchange, EXCHANGE_OPTIONS, plain=True)
    if (inside := made["inside"]) is not None:
        checked_choice("strategy.inside", inside, INSIDE, plain=True)


def _check_no_own_parts(strategy: Group) -> None:
    """Refuse an object of the user's own class under a strategy that takes none."""
    for part, given in strategy.items():
        if f"strategy.{part}" in PARTS and is_target(given):
            raise UserError(
                f"strategy.{part}={as_typed(given)} was given, but strategy "
                f"{strategy.get('_target_')} takes no {part}; use one whose parameters live in "
                "host memory (strategy=hybrid, async, backup ...)"
            )


def _check_together(given: Mapping[str, Any]) -> None:
    """Refuse options that contradict each other; raises UserError."""
    trainer, strategy = given["trainer"], given["strategy"]
    devices = trainer.get("devices", "auto")  # a value that only the job knows is not there
    if given.get("test_only") and given.get("ckpt", "") is None:
        raise UserError("test_only=true: name the checkpoint to test with ckpt=PATH")
    if given.get("profile") and trainer.get("profiler") is not None:
        raise UserError(
            f"profile=true was given together with trainer.profiler={trainer['profiler']}; a "
            "trainer has one profiler: leave one of them out"
        )
    if isinstance(devices, list) and (not devices or len(set(devices)) < len(devices)):
        raise UserError(f"trainer.devices={devices}: name GPUs, and each of them once, as in [0,2]")
    faults = read_faults(given.get("faults"))
    if faults and "faults" not in strategy:
        raise UserError(
            f"faults={given['faults']} was given, but strategy {strategy.get('_target_')} cannot "
            "be disturbed on purpose; use one whose parameters live in host memory "
            "(strategy=hybrid, async, backup ...)"
        )
    if not isinstance(devices, int | list) or strategy.get("_target_") != STRATEGY:
        return
    n_devices = len(devices) if isinstance(devices, list) else devices
    n_workers = n_devices * strategy.get("workers_per_device", 1) * number_of_hosts(given)
    if not is_target(policy := strategy.get("policy", "hybrid")):  # made after its class is checked
        make_policy(policy).begin(n_workers)
    check_workers(read_faults(strategy.get("faults")), n_workers)


# ---- arguments of classes -----------------------------------------------------------------------


def check_types(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Check that a typed value has the type of the value that it replaces."""
    parsed = config_values.parse(overrides)
    keys = [x.key_or_group for x in parsed if not x.is_delete() and "." in x.key_or_group]
    keys = [x for x in keys if x.partition(".")[0] in OPEN and not x.endswith("._target_")]
    for key in keys:
        old, new = _value(base_config(parsed), key), _value(cfg, key)
        if old is not None and new is not None:
            _check_type(key, old, new)


def _check_optimizer_is_used(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Check that a typed optimizer reaches the model; one of the user's own may make another."""
    typed = [x for x in config_values.parse(overrides) if not x.is_delete()]
    found = [x for x in typed if x.key_or_group.partition(".")[0] == "optimizer"]
    if found and not uses_optimizer(cfg, "model", "data", "callbacks"):
        raise UserError(
            f"{found[0].input_line} was given, but nothing of the model refers to it; name the "
            "model's own argument (model.NAME=...), or hand it over: 'model.NAME=${optimizer}', "
            "'model.NAME=${optimizer.lr}'"
        )


def uses_optimizer(cfg: DictConfig, *groups: str) -> bool:
    """Whether one of these groups of the configuration refers to ``optimizer``."""
    there = {group: cfg[group] for group in groups if group in cfg}
    return "${optimizer" in OmegaConf.to_yaml(there)


def _value(cfg: DictConfig, key: str) -> Any:
    """The value; None if it is missing or known only in the running job."""
    return OmegaConf.select(cfg, key, throw_on_missing=False, throw_on_resolution_failure=False)


def _check_type(key: str, old: Any, new: Any) -> None:
    kinds = {bool: bool, int: int, float: Finite | Sequence[Finite], DictConfig: Group}
    kind: Any = {**kinds, ListConfig: list}.get(type(old), Any)
    plain = OmegaConf.to_container(new, resolve=True) if OmegaConf.is_config(new) else new
    if kind is int and isinstance(plain, float) and plain.is_integer():
        return  # 1e3
    if not allows(plain, kind, plain=True):
        such = OmegaConf.to_container(old) if OmegaConf.is_config(old) else old
        raise UserError(f"{refusal(key, plain, kind)}, such as {shown(such)}")
