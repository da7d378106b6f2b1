"""Options of a strategy: types and defaults, and the check of what a user gives.

Nothing here imports torch, so that the command line refuses an option at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, cast

from hybridtrain.engine.options.exchange_options import EXCHANGE_OPTIONS
from hybridtrain.engine.policies import POLICIES
from hybridtrain.errors import UserError
from hybridtrain.util.option_types import (
    Named,
    Natural,
    NotNegative,
    Positive,
    Range,
    Several,
    Workers,
    check,
    hints,
    is_target,
    name_of,
)
from hybridtrain.util.own_parts import is_class

Threads = Annotated[int, Range(1, 1024)]  # beyond, OpenMP ends the process


class Shards(TypedDict):
    """``number`` shards of an epoch's order; a worker takes ``visit`` mini-batches from one."""

    number: Positive
    visit: Positive


class LightningArguments(TypedDict, total=False):
    """Passed on to Lightning's ``ParallelStrategy``."""

    accelerator: Any
    parallel_devices: list[Any] | None
    cluster_environment: Any
    checkpoint_io: Any
    precision_plugin: Any


class SchemeArguments(TypedDict, total=False):
    """Options that need no Lightning: of :class:`hybridtrain.Server` as well."""

    exchange: Named | None
    update: Named | None
    correction: Named | None
    state_dtype: Literal["bf16"] | None
    start_method: Literal["auto", "fork", "spawn", "forkserver"]
    threads_per_worker: Threads | Literal["auto"]
    stop_grace_s: NotNegative
    on_nonfinite: Literal["auto", "raise", "drop", "skip_step"]
    on_failure: Literal["stop", "continue", "restart"]
    min_workers: Workers
    max_restarts: Natural | None
    hang_timeout_s: Annotated[float, Range(0.1)] | Literal["auto"] | None
    record: str | Path | None


class StrategyArguments(LightningArguments, SchemeArguments, total=False):
    """Options of :class:`hybridtrain.HybridStrategy` besides the policy; it says what each does."""

    inside: Named | None
    workers_per_device: Workers
    device_memory_fraction: Annotated[float, Range(0, 1, "(")] | None
    transport_dtype: Literal["bf16"] | None
    num_samples_key: str | int | None
    batch_size_per_worker: Several | None
    iterable: Literal["deal", "own"] | None
    keep_order: bool
    data_shards: Shards | None
    on_oom: Literal["raise", "drop", "skip_step"]
    faults: Sequence[Any] | None
    min_hosts: Workers | None
    hosts_key: str | None
    host_sums: bool
    checkpoint: Literal["blocking", "background"]


DEFAULTS = StrategyArguments(
    exchange=None,
    update=None,
    correction=None,
    state_dtype=None,
    inside=None,
    workers_per_device=1,
    start_method="auto",
    threads_per_worker="auto",
    stop_grace_s=30.0,
    device_memory_fraction=None,
    transport_dtype=None,
    num_samples_key=None,
    batch_size_per_worker=None,
    iterable=None,
    keep_order=False,
    data_shards=None,
    on_nonfinite="auto",
    on_oom="raise",
    on_failure="stop",
    min_workers=1,
    max_restarts=3,
    hang_timeout_s="auto",
    faults=(),
    min_hosts=None,
    hosts_key=None,
    host_sums=False,
    record=None,
    checkpoint="blocking",
)
OPTIONS = ("policy", *DEFAULTS)


def of_lightning(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that Lightning's ``ParallelStrategy`` takes."""
    return {name: given[name] for name in hints(LightningArguments) if name in given}


def check_sizes(sizes: Sequence[int] | None, n_workers: int) -> None:
    """Check that ``batch_size_per_worker``, if given, has a size for each worker.

    Raises:
        UserError: if it has more or fewer.
    """
    if sizes is not None and len(sizes) != n_workers:
        raise UserError(
            f"batch_size_per_worker={list(sizes)} was given for {n_workers} "
            f"worker{'s' * (n_workers > 1)}; give one size for each worker"
        )


# ---- what is given ------------------------------------------------------------------------------

_OF_DDP = {
    "find_unused_parameters": "unused parameters need no option here",
    "static_graph": "there is no graph to be prepared here",
    "gradient_as_bucket_view": "gradients are not kept in buckets here",
    "process_group_backend": "there is no process group here",
    "timeout": "there is no process group here; see stop_grace_s",
    "ddp_comm_hook": "gradients travel through shared memory here",
}


def checked(given: Mapping[str, Any], prefix: str = "", plain: bool = False) -> StrategyArguments:
    """The options given, once checked, and the defaults of the others.

    Args:
        given: ``policy`` as well.
        prefix: of the options' names in messages.
        plain: they come from a configuration, not from Python.

    Raises:
        UserError: naming the option, what is allowed, and what was meant.
    """
    kinds = {"policy": Named, **hints(StrategyArguments)}
    for name in given:
        if name not in kinds:
            raise UserError(unknown(name, given, prefix))
    for name in given:
        if isinstance(given[name], type):
            raise is_class(prefix + name, given[name])
        check(prefix + name, given[name], kinds[name], plain)
    _check_places(given, prefix)
    every = cast(StrategyArguments, {**DEFAULTS, **given})
    _check_failures(every)
    return every


def _check_failures(given: StrategyArguments) -> None:
    """Check that the options for failures go with each other."""
    if given["on_failure"] == "restart" and given["max_restarts"] == 0:
        raise UserError(
            "on_failure=restart was given with max_restarts=0, which allows none; give at "
            "least 1, or on_failure=stop or continue"
        )
    if given["on_failure"] == "stop" and given["min_hosts"] is not None:
        raise UserError(
            f"min_hosts={given['min_hosts']} was given with on_failure=stop, which goes on with "
            "none less than all; use on_failure=continue or restart"
        )
    if given["on_failure"] == "stop" and given["min_workers"] > 1:
        raise UserError(
            f"min_workers={given['min_workers']} was given with on_failure=stop, which goes on "
            "with none less than all; leave it out, or use on_failure=continue or restart"
        )


# ---- the key meant ------------------------------------------------------------------------------

_PARTS: dict[str, Mapping[str, Callable[..., Any]]] = {
    "policy": POLICIES,
    "exchange": EXCHANGE_OPTIONS,
}


def unknown(name: str, given: Mapping[str, Any], prefix: str = "") -> str:
    """The message for an option that a strategy does not know, with the key that was meant."""
    if name in _OF_DDP:
        return f"{prefix}{name} was given, an option of ddp; leave it out: {_OF_DDP[name]}"
    said = f"{prefix}{name} was given, which the strategy does not know; "
    chosen = {
        f"{prefix}{part}.{each}": each
        for part, known in _PARTS.items()
        for each in _takes(known, name_of(given.get(part)))
    }
    if name not in chosen.values() and (owners := _owners(name)):
        parts = [given[part] for part in _PARTS if given.get(part) is not None]
        made = any(name_of(part) is None for part in parts)
        own = f"takes {', '.join(chosen)}" if chosen else "is an object" if made else "takes none"
        return f"{said}it is a parameter of {', '.join(owners)}; yours {own}"
    if close := _closest(name, {prefix + each: each for each in OPTIONS} | chosen):
        return f"{said}did you mean {close}?"
    open_parts = [f"{prefix}{part}.{name}" for part in ("update", "correction") if given.get(part)]
    hint = f"; did you mean {' or '.join(open_parts)}?" if open_parts else ""
    return f"{said}it takes {', '.join([*chosen, *OPTIONS])}{hint}"


def _check_places(given: Mapping[str, Any], prefix: str) -> None:
    """Refuse, in the mapping of one part, options of the strategy and of the other part."""
    for part in _PARTS:
        mapping = given.get(part)
        if not isinstance(mapping, Mapping) or is_target(mapping):
            continue
        for name in mapping:
            if name in OPTIONS:
                raise UserError(f"{prefix}{part}.{name} was given; did you mean {prefix}{name}?")
            owners = _owners(name)
            if owners and not any(owner.startswith(part) for owner in owners):
                of = ", ".join(owners)
                raise UserError(f"{prefix}{part}.{name} was given, a parameter of {of}")


def _owners(name: str) -> list[str]:
    """The policies and exchanges that take a parameter of this name."""
    return [
        f"{part}={each}"
        for part, known in _PARTS.items()
        for each in known
        if name in _takes(known, each)
    ]


def _takes(known: Mapping[str, Callable[..., Any]], name: str | None) -> list[str]:
    return list(signature(known[name]).parameters) if name and name in known else []


def _closest(name: str, keys: Mapping[str, str]) -> str | None:
    """The key whose last part is most like the name."""
    close = get_close_matches(name, list(keys.values()), n=1)
    return next(key for key, last in keys.items() if last == close[0]) if close else None
