"""What a user may give to a strategy: each option's name, type, default and text, in groups.

A user gives options flat, by keyword or in the order of their places: from Python, in YAML, on the
command line. :func:`given_flat` makes the groups of them. Lightning, Hydra and ``help`` see a
signature with every option; type checkers see the fields of the groups. Values are checked by what
``HybridStrategy`` makes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from functools import update_wrapper
from inspect import Parameter, Signature, cleandoc
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, get_type_hints

import torch

from hybridtrain.exchanges import ExchangeSpec
from hybridtrain.lightning.strategy_options import known_options
from hybridtrain.policies import Spec
from hybridtrain.updates.named import UpdateSpec
from hybridtrain.updates.staleness import CorrectionSpec

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

    policy: Spec = "hybrid"
    _: KW_ONLY
    exchange: ExchangeSpec = None
    update: UpdateSpec = None
    correction: CorrectionSpec = None


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

    workers_per_device: int = 1
    start_method: str = "auto"
    threads_per_worker: int | Literal["auto"] = "auto"
    stop_grace_s: float = 30.0
    device_memory_fraction: float | None = None
    transport_dtype: str | None = None


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
    batch_size_per_worker: Sequence[int] | None = None
    iterable: str | None = None
    keep_order: bool = False
    data_shards: Mapping[str, int] | None = None


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

    on_nonfinite: str = "auto"
    on_oom: str = "raise"
    on_failure: str = "stop"
    min_workers: int = 1
    max_restarts: int | None = 3
    hang_timeout_s: float | Literal["auto"] | None = "auto"
    faults: Sequence[Any] = ()


@dataclass(frozen=True, kw_only=True)
class FileArguments:
    """What is written.

    Args:
        record: a file or directory to write the order of events to, for ``hybridtrain.replay``.
        checkpoint: ``"blocking"``, or ``"background"``: ``ModelCheckpoint``'s files come later.
    """

    record: str | Path | None = None
    checkpoint: str = "blocking"


@dataclass(frozen=True, kw_only=True)
class LightningArguments:
    """What Lightning's ``ParallelStrategy`` takes.

    Args:
        **lightning: passed on to Lightning's ``ParallelStrategy``.
    """

    accelerator: Any = None
    parallel_devices: list[torch.device] | None = None
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
    signature = _signature()

    def flatten(
        init: Callable[[Any, StrategyArguments], None],
    ) -> Callable[Concatenate[Any, P], None]:
        def flat(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
            given = signature.bind(self, *args, **kwargs).arguments
            del given["self"]
            lightnings = given.pop("lightning", {})
            known_options(lightnings, PLACES)
            init(self, StrategyArguments(**given, **lightnings))

        update_wrapper(flat, init)
        vars(flat)["__signature__"] = signature
        return flat

    return flatten


def _signature() -> Signature:
    either = Parameter.POSITIONAL_OR_KEYWORD
    types, defaults = get_type_hints(StrategyArguments), vars(StrategyArguments())
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
