"""The parts of a strategy; its server and its world, made of them.

Lightning's strategy and the public :class:`~hybridtrain.standalone.server.Server` are schemes.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch

from hybridtrain.engine.exchanges import Inside, Requirements, begin_policy, exchange_of
from hybridtrain.engine.memory import UpdateMaker
from hybridtrain.engine.monitoring.hang_detector import HangTimeout
from hybridtrain.engine.monitoring.watchdog import SlowReport, Watchdog, to_stderr
from hybridtrain.engine.options.strategy_arguments import StrategyArguments
from hybridtrain.engine.policies import Policy, make_policy
from hybridtrain.engine.recording.recorder import KINDS, RecordingServer
from hybridtrain.engine.recording.run_description import Recording, header
from hybridtrain.engine.recovery.failure_policy import Judge, OnFailure
from hybridtrain.engine.server.run_statistics import Traffic
from hybridtrain.engine.server.server import ParameterServer
from hybridtrain.engine.step.guard import OnFault
from hybridtrain.engine.updates.named import update_of
from hybridtrain.engine.updates.staleness import make_correction
from hybridtrain.engine.worker.device.cuda import forbids_fork
from hybridtrain.engine.worlds.other_hosts import OtherHosts
from hybridtrain.engine.worlds.process_world import ProcessWorld
from hybridtrain.errors import UserError
from hybridtrain.util.option_types import as_typed

STATE_DTYPES = {None: torch.float32, "bf16": torch.bfloat16}


class StartOptions(NamedTuple):
    """How workers are started; ``threads``: of each, for torch."""

    method: str
    threads: int


class Scheme:
    """The parts of a strategy; a model and data are added by a run.

    ``policy``, ``exchange``, ``update``, ``correction``: its parts. ``state_dtype``: of what the
    optimizer of the masters keeps. ``requirements``: what policy and exchange rely on, once the
    number of workers is known.
    """

    @property
    def inside(self) -> Inside | None:
        """The scheme within a host; ``None``: its workers have none of their own."""
        return None

    def choose_parts(self, given: StrategyArguments) -> None:
        """Make the parts.

        Args:
            given: options of a strategy that have been checked, its policy too.

        Raises:
            UserError: if a name is unknown, or parts contradict each other.
        """
        policy: Any = given["policy"]  # type: ignore[typeddict-item]
        self.policy: Policy = make_policy(policy)
        self.correction = make_correction(given["correction"])
        self.exchange = exchange_of(self.policy, given["exchange"])
        self.update = update_of(self.exchange, given["update"])
        self.state_dtype = STATE_DTYPES[given["state_dtype"]]
        self.requirements = Requirements()  # until the number of workers is known
        self.start_method: str = given["start_method"]
        self.stop_grace_s = given["stop_grace_s"]
        self.threads_per_worker = given["threads_per_worker"]
        self.on_fault = OnFault(given["on_nonfinite"], given["on_oom"])
        self.recording = Recording.at(given["record"])
        merges = 1 if self.update.merge is None else self.update.merge.least
        self.on_failure = OnFailure(
            given["on_failure"],
            given["min_workers"],
            given["max_restarts"],
            merges,
            joins=given["min_hosts"] is not None,
        )
        self.patience = HangTimeout.of(given["hang_timeout_s"])

    @property
    def world_size(self) -> int:
        """The number of workers."""
        raise NotImplementedError


def check_parts(scheme: Scheme) -> None:
    """Refuse options that contradict the parts; raises ``UserError``.

    A sweep over strategies may keep a correction where it has no effect.
    """
    scheme.on_failure.check(scheme.world_size)
    correction, wants = scheme.correction, scheme.requirements
    given = f"correction={as_typed(correction)} was given, but under"
    if correction is not None and wants.delay:
        raise UserError(
            f"{given} policy={as_typed(scheme.policy)} each gradient is one update late, which "
            "these rules do not know of; use strategy.policy.extrapolate=true, or leave it out"
        )
    if correction is not None and wants.whole_rounds:
        warnings.warn(
            f"{given} policy={as_typed(scheme.policy)} no gradient is "
            "ever late, so it changes nothing",
            stacklevel=2,
        )
    if correction is not None and wants.in_place:
        raise UserError(
            f"{given} hogwild no gradient is ever sent that "
            "could be corrected; leave it out, or use strategy=async"
        )
    if scheme.state_dtype != torch.float32:
        _check_state_dtype(scheme)
    if wants.parameters == "own":
        _check_own_parameters(scheme)


def _check_state_dtype(scheme: Scheme) -> None:
    """Refuse state of half the size where the server's flat pass does not keep it."""
    merge, wants = scheme.update.merge, scheme.requirements
    if wants.steps_in_worker:
        given = f"exchange={as_typed(scheme.exchange)}"
        reason = "workers step with state of their own optimizers; use exchange=gradient"
    elif merge is not None:
        given = f"update={type(merge).__name__}"
        reason = "a merge of gradients one by one steps each parameter by itself; use update=user"
    else:
        return
    raise UserError(
        f"state_dtype=bf16 was given with {given}, but {reason}, or leave state_dtype out"
    )


def _check_own_parameters(scheme: Scheme) -> None:
    """Check the options beside an exchange with own parameters in each worker."""
    asked = f"exchange={as_typed(scheme.exchange)}"
    fault, state = scheme.on_fault, "each worker's optimizer has a state of its own, which "
    free = not scheme.requirements.whole_rounds
    survives = ("continue", "restart", "stop") if free else ("stop",)
    lost = "the others wait for the steps that it has made since the last exchange"
    for name, choice, allowed, reason in (
        ("on_failure", scheme.on_failure.choice, survives, lost),
        (
            "on_nonfinite",
            fault.nonfinite,
            ("auto", "raise"),
            f"{state}would not be finite any more",
        ),
        ("on_oom", fault.oom, ("raise",), "a worker cannot take back its own steps"),
    ):
        if choice not in allowed:
            raise UserError(
                f"{name}={choice} was given with {asked}, but {reason}; use {name}={allowed[-1]}, "
                "or exchange=gradient"
            )
    if scheme.correction is not None:
        raise UserError(
            f"correction={as_typed(scheme.correction)} was given with {asked}, but no gradient is "
            "handed over that could be corrected; leave it out, or use exchange=gradient"
        )


# ---- the server of a run, and its world ---------------------------------------------------------


def required(scheme: Scheme) -> Requirements:
    """Derive the requirements of policy and exchange from the number of workers.

    Raises:
        UserError: if they contradict each other.
    """
    return begin_policy(deepcopy(scheme.policy), scheme.exchange, scheme.world_size, scheme.inside)


def serving(
    scheme: Scheme,
    records: bool,
    threads: int,
    server_threads: int,
    traffic: Traffic | None = None,
) -> ParameterServer:
    """The server of a run, which records its events if a record is wanted.

    Args:
        scheme: the strategy.
        records: there is something to record.
        threads: of each worker.
        server_threads: of an update.
        traffic: of several hosts, which have equally many workers.
    """
    recording = scheme.recording
    if recording is None or not records:
        return make_server(scheme, server_threads, partial(ParameterServer, traffic=traffic))
    writer = recording.open()
    said = header(scheme, threads, server_threads)
    if traffic is not None:
        each = scheme.world_size // len(traffic())
        said["hosts"] = [worker // each for worker in range(scheme.world_size)]
    writer.tell({"header": {**said, "kinds": KINDS, "about": recording.about}})
    return make_server(scheme, server_threads, partial(RecordingServer, writer, traffic=traffic))


def make_server(
    scheme: Scheme, threads: int, kind: Callable[..., ParameterServer]
) -> ParameterServer:
    """The strategy's server, made by ``kind``; an update may use ``threads`` threads."""
    policy, correction = deepcopy((scheme.policy, scheme.correction))
    size, exchange = scheme.world_size, scheme.exchange
    merge, inside = scheme.update.merge, scheme.inside
    given = {"correction": correction, "exchange": exchange, "merge": merge, "inside": inside}
    return kind(policy, size, threads, state_dtype=scheme.state_dtype, **given)


def world_of(
    scheme: Scheme,
    server: ParameterServer,
    judge: Judge,
    start: StartOptions,
    device_names: Sequence[str],
    worker_updates: bool,
    others: OtherHosts | None = None,
    report: SlowReport | None = None,
) -> ProcessWorld:
    """The processes of the workers, with a watchdog for hanging and slow ones."""
    report = report or SlowReport(server.statistics.stats, to_stderr)
    watchdog = Watchdog(scheme.patience, also=report)
    return ProcessWorld(
        server,
        scheme.world_size,
        start.method,
        start.threads,
        scheme.stop_grace_s,
        judge,
        watchdog,
        device_names,
        worker_updates,
        others,
    )


def workers_may_update(scheme: Scheme) -> bool:
    """Whether workers may make updates without the server."""
    maker = scheme.requirements.maker
    corrects = maker is UpdateMaker.ONE_BY_ONE and scheme.correction is not None
    return maker.borrows and not corrects and scheme.state_dtype == torch.float32


def resolve_start_method(method: str) -> str:
    """Resolve ``auto``.

    Raises:
        UserError: if workers cannot be forked.
    """
    if method == "auto":
        fork_is_safe = sys.platform.startswith("linux") and not forbids_fork()
        return "fork" if fork_is_safe else "spawn"
    if method == "fork" and forbids_fork():
        raise UserError(
            "start_method=fork was given, but CUDA is already initialised in this process, which "
            "forked workers cannot use; do not touch CUDA before trainer.fit, or use "
            "start_method=spawn"
        )
    return method


def usable_cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_of_an_update(scheme: Scheme, here: int, threads: int) -> int:
    """The number of threads of an update.

    All cores, where workers wait for it; those that no worker computes on, where they go on; one,
    where they run freely.

    Args:
        scheme: whose requirements are known.
        here: workers on this host.
        threads: with which each computes on the CPU.
    """
    wants = scheme.requirements
    if not wants.whole_rounds:
        return 1
    return max(1, usable_cores() - (here * threads if wants.delay else 0))


def threads_of_a_worker(scheme: Scheme, here: int) -> int:
    """The user's number of threads, or a worker's share of the cores, of ``here`` on this host."""
    wanted = scheme.threads_per_worker
    return max(1, usable_cores() // here) if wanted == "auto" else wanted
