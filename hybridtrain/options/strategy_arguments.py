"""What a user may give to a strategy: each option's name, type, default and text, in groups.

A user gives options flat, by keyword or in the order of their places: from Python, in YAML, on the
command line. :func:`given_flat` makes the groups of them. Lightning, Hydra and ``help`` see a
signature with every option; type checkers see the fields of the groups. :func:`checked` holds
values to their types, from Python and, without importing torch, from the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from difflib import get_close_matches
from functools import update_wrapper
from inspect import Parameter, Signature, cleandoc, signature
from pathlib import Path
from typing import Annotated, Any, Concatenate, Literal, ParamSpec, TypedDict, get_type_hints

from hybridtrain.errors import UserError
from hybridtrain.options.exchange_options import EXCHANGE_OPTIONS
from hybridtrain.policies import POLICIES
from hybridtrain.util.named_choice import name_of
from hybridtrain.util.option_types import (
    Above0,
    Named,
    Natural,
    NotNegative,
    Positive,
    Range,
    Several,
    check_fields,
)

P = ParamSpec("P")


@dataclass(frozen=True)
class RuleArguments:
    """The parts of a strategy, and what corrects late gradients.

    Args:
        policy: when a gradient counts: the name of one of ``hybridtrain.policies.POLICIES``
            (``"hybrid"``: wait for all, apply their mean), a mapping with its name and parameters
            (``{"name": "backup", "k": 3}``), or an object of :class:`hybridtrain.policies.Policy`.
        exchange: what workers hand over: the name of one of ``hybridtrain.exchanges.EXCHANGES``, a
            mapping with its name and parameters (``{"name": "movement", "every": 8}``), or an
            object; ``None``: gradients, or what goes with the policy.
        update: how the masters move: ``"user"`` (the module's own optimizer), ``"mean"``, a name of
            ``torch.optim`` or of :mod:`hybridtrain.updates.delay_tolerant`, or a mapping with its
            name and arguments (``{"name": "adagrad", "lr": 0.1}``); ``None``: what goes with the
            exchange.
        correction: what is done about late gradients: nothing, or one of
            ``hybridtrain.updates.staleness.CORRECTIONS``, given like a policy.
    """

    policy: Named = "hybrid"
    _: KW_ONLY
    exchange: Named | None = None
    update: Named | None = None
    correction: Named | None = None


@dataclass(frozen=True, kw_only=True)
class WorkerArguments:
    """How many workers there are, how their processes are made, and what each may take.

    Args:
        workers_per_device: how many workers share one device.
        start_method: ``"fork"``, ``"spawn"``, ``"forkserver"``, or ``"auto"``: fork where that is
            safe (Linux, CUDA not yet initialised), else spawn.
        threads_per_worker: torch threads of each worker; ``"auto"``: cores divided by workers.
        stop_grace_s: how long workers may take to stop after Ctrl-C or a failure, in seconds.
        device_memory_fraction: of its GPU, for each worker, above 0 and up to 1; ``None``: no limit
            for one alone, and where several workers have one, equal shares until it is measured
            what each needs, then that and an equal part of the rest.
        transport_dtype: ``"bf16"``: float32 gradients are rounded to it on their way.
    """

    workers_per_device: Positive = 1
    start_method: Literal["auto", "fork", "spawn", "forkserver"] = "auto"
    threads_per_worker: Positive | Literal["auto"] = "auto"
    stop_grace_s: NotNegative = 30.0
    device_memory_fraction: Annotated[float, Range(0, 1, "(")] | None = None
    transport_dtype: Literal["bf16"] | None = None


class Shards(TypedDict):
    """So many parts of an epoch's order, and mini-batches that a worker takes from one."""

    number: Positive
    visit: Positive


@dataclass(frozen=True, kw_only=True)
class DataArguments:
    """Who trains on which samples, and how many a mini-batch has.

    Args:
        num_samples_key: the entry of a batch that tells how many samples it has (a number, or a
            tensor or list with the samples along its first dimension), where it cannot be seen.
        batch_size_per_worker: a size for each worker's mini-batches; else the DataLoader's for all.
        iterable: what is done about streams, whose samples cannot be shared out: ``"deal"``: each
            worker takes every W-th mini-batch; ``"own"``: they share themselves out; ``None``:
            as ``"own"``, with a warning.
        keep_order: go through training data that are not shuffled in their order, also with
            several workers; else they are shuffled then, as under DDP.
        data_shards: ``{"number": S, "visit": N}``: cut the epoch's order into S shards; a worker
            that draws takes N mini-batches from one, then goes to the one visited least.
    """

    num_samples_key: str | int | None = None
    batch_size_per_worker: Several | None = None
    iterable: Literal["deal", "own"] | None = None
    keep_order: bool = False
    data_shards: Shards | None = None

    def check_workers(self, n_workers: int) -> None:
        """See that there is a size for each worker, or one for all; raises UserError."""
        sizes = self.batch_size_per_worker
        if sizes is not None and len(sizes) != n_workers:
            raise UserError(
                f"batch_size_per_worker={list(sizes)} was given for {n_workers} "
                f"worker{'s' * (n_workers > 1)}; give one size for each worker"
            )


@dataclass(frozen=True, kw_only=True)
class FailureArguments:
    """What follows when a worker fails, hangs, or has a gradient that is of no use.

    Args:
        on_nonfinite: when a worker's gradient is not finite: ``"raise"`` ends the run and says
            whose, ``"drop"`` leaves that worker out of the step, ``"skip_step"`` all of it;
            ``"auto"``: raise, but drop where a ``SpikeDetection`` sees a loss that is not finite.
        on_oom: the same when a worker runs out of memory in a step.
        on_failure: when a worker fails or dies: ``"stop"`` all, ``"continue"`` without it, or
            ``"restart"`` it.
        min_workers: with fewer left, the run stops.
        max_restarts: in the whole run; ``None``: any number.
        hang_timeout_s: seconds without a sign of life after which a worker is killed; ``"auto"``:
            from its own past; ``None``: never. Its stacks are printed before.
        faults: what is to go wrong on purpose: ``[{"worker": 1, "step": 20, "kind": "kill"}]``; see
            :class:`hybridtrain.testing.faults.Fault`.
    """

    on_nonfinite: Literal["auto", "raise", "drop", "skip_step"] = "auto"
    on_oom: Literal["raise", "drop", "skip_step"] = "raise"
    on_failure: Literal["stop", "continue", "restart"] = "stop"
    min_workers: Positive = 1
    max_restarts: Natural | None = 3
    hang_timeout_s: Above0 | Literal["auto"] | None = "auto"
    faults: Sequence[Any] | None = ()

    def check_failures(self) -> None:
        """See that the options go with each other.

        Raises:
            UserError: naming those that do not.
        """
        if self.on_failure == "restart" and self.max_restarts == 0:
            raise UserError(
                "on_failure=restart was given with max_restarts=0, which allows none; give at "
                "least 1, or on_failure=stop or continue"
            )
        if self.on_failure == "stop" and self.min_workers > 1:
            raise UserError(
                f"min_workers={self.min_workers} was given with on_failure=stop, which goes on "
                "with none less than all; leave it out, or use on_failure=continue or restart"
            )


@dataclass(frozen=True, kw_only=True)
class FileArguments:
    """What is written.

    Args:
        record: a file or directory to write the order of events to, for ``hybridtrain.replay``.
        checkpoint: ``"blocking"``, or ``"background"``: ``ModelCheckpoint``'s files come later.
    """

    record: str | Path | None = None
    checkpoint: Literal["blocking", "background"] = "blocking"


@dataclass(frozen=True, kw_only=True)
class LightningArguments:
    """What Lightning's ``ParallelStrategy`` takes.

    Args:
        **lightning: passed on to Lightning's ``ParallelStrategy``.
    """

    accelerator: Any = None
    parallel_devices: list[Any] | None = None
    cluster_environment: Any = None
    checkpoint_io: Any = None
    precision_plugin: Any = None

    def for_lightning(self) -> dict[str, Any]:
        """By name."""
        return {each.name: getattr(self, each.name) for each in fields(LightningArguments)}


GROUPS = (
    *(RuleArguments, WorkerArguments, DataArguments),
    *(FailureArguments, FileArguments, LightningArguments),
)


@dataclass(frozen=True)
class StrategyArguments(
    LightningArguments,
    FileArguments,
    FailureArguments,
    DataArguments,
    WorkerArguments,
    RuleArguments,
):
    """All of them."""


# ---- the flat form ------------------------------------------------------------------------------

# Somebody may give options by position: these places stay, and a new one is the last.
PLACES = (
    *("policy", "workers_per_device", "start_method", "threads_per_worker", "stop_grace_s"),
    *("num_samples_key", "on_nonfinite", "on_oom", "batch_size_per_worker", "iterable"),
    *("keep_order", "correction", "transport_dtype", "record", "checkpoint", "on_failure"),
    *("min_workers", "max_restarts", "faults", "hang_timeout_s", "device_memory_fraction"),
    *("exchange", "update", "data_shards"),
)


def given_flat(
    groups: Callable[P, StrategyArguments],
) -> Callable[[Callable[[Any, StrategyArguments], None]], Callable[Concatenate[Any, P], None]]:
    """Let an ``__init__`` that takes the groups be called with the options themselves."""
    every = _signature()

    def flatten(
        init: Callable[[Any, StrategyArguments], None],
    ) -> Callable[Concatenate[Any, P], None]:
        def flat(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
            given = every.bind(self, *args, **kwargs).arguments
            del given["self"]
            init(self, checked(given | given.pop("lightning", {})))

        update_wrapper(flat, init)
        vars(flat)["__signature__"] = every
        return flat

    return flatten


def _signature() -> Signature:
    either = Parameter.POSITIONAL_OR_KEYWORD
    types = get_type_hints(StrategyArguments, include_extras=True)
    defaults = vars(StrategyArguments())
    options = [
        Parameter(name, either, default=defaults[name], annotation=types[name]) for name in PLACES
    ]
    others = Parameter("lightning", Parameter.VAR_KEYWORD, annotation=Any)
    return Signature([Parameter("self", either), *options, others], return_annotation=None)


def with_options(text: str | None) -> str:
    """A docstring with the options of all groups, before what it says of errors."""
    about, _, errors = cleandoc(text or "").partition("Raises:")
    said = [cleandoc(group.__doc__ or "").partition("Args:\n")[2] for group in GROUPS]
    return "\n".join([f"{about}Args:", *said, "", f"Raises:{errors}"])


# ---- the boundary -------------------------------------------------------------------------------

_OF_DDP = {
    "find_unused_parameters": "unused parameters need no option here",
    "static_graph": "there is no graph to be prepared here",
    "gradient_as_bucket_view": "gradients are not kept in buckets here",
    "process_group_backend": "there is no process group here",
    "timeout": "there is no process group here; see stop_grace_s",
    "ddp_comm_hook": "gradients travel through shared memory here",
}


def checked(given: Mapping[str, Any], prefix: str = "", plain: bool = False) -> StrategyArguments:
    """The options of a strategy, if all are known, in their ranges, and go with each other.

    Args:
        prefix: of the option's name, in what is said of it.
        plain: they come from a configuration, not from Python.

    Raises:
        UserError: naming the option, what is allowed, and what was meant.
    """
    for name in given:
        if name not in StrategyArguments.__dataclass_fields__:
            raise UserError(unknown(name, given, prefix))
    made = StrategyArguments(**given)
    check_fields(made, prefix, plain)
    made.check_failures()
    return made


def unknown(name: str, given: Mapping[str, Any], prefix: str = "") -> str:
    """The complaint about an option that a strategy does not know; it names the key meant."""
    if name in _OF_DDP:
        return f"{prefix}{name} was given, an option of ddp; leave it out: {_OF_DDP[name]}"
    said = f"{prefix}{name} was given, which the strategy does not know; "
    chosen = {
        f"{prefix}{part}.{each}": each
        for part, known in _PARTS.items()
        for each in _takes(known, name_of(given.get(part)))
    }
    others = [
        f"{part}={each}"
        for part, known in _PARTS.items()
        for each in known
        if name in _takes(known, each) and name not in chosen.values()
    ]
    if others:
        own = f"yours takes {', '.join(chosen)}" if chosen else "yours takes none"
        return f"{said}it is a parameter of {', '.join(others)}; {own}"
    if close := _closest(name, {prefix + each: each for each in PLACES} | chosen):
        return f"{said}did you mean {close}?"
    return f"{said}it takes {', '.join([*chosen, *PLACES])}"


_PARTS: dict[str, Mapping[str, Callable[..., Any]]] = {
    "policy": POLICIES,
    "exchange": EXCHANGE_OPTIONS,
}


def _takes(known: Mapping[str, Callable[..., Any]], name: str | None) -> list[str]:
    return list(signature(known[name]).parameters) if name and name in known else []


def _closest(name: str, keys: Mapping[str, str]) -> str | None:
    """The key whose last part is most like the name."""
    close = get_close_matches(name, list(keys.values()), n=1)
    return next(key for key, last in keys.items() if last == close[0]) if close else None
