"""Turn the process that called ``trainer.fit`` into the server, and start the workers."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from typing import Any, NoReturn

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.seed import reset_seed
from lightning_utilities.core.rank_zero import rank_zero_warn
from pytorch_lightning.accelerators import CPUAccelerator
from torch.distributed import distributed_c10d

from hybridtrain.engine.exchanges import check_visits
from hybridtrain.engine.memory.scratch_file import Scratch
from hybridtrain.engine.monitoring.watchdog import Watchdog
from hybridtrain.engine.options.strategy_arguments import check_sizes
from hybridtrain.engine.recording.run_description import Runner
from hybridtrain.engine.recovery.failure_policy import Judge
from hybridtrain.engine.scheme import (
    StartOptions,
    check_parts,
    resolve_start_method,
    serving,
    threads_of_a_worker,
    threads_of_an_update,
    usable_cores,
    workers_may_update,
    world_of,
)
from hybridtrain.engine.worker.client import Client
from hybridtrain.engine.worker.inbox import StopRequested
from hybridtrain.engine.worlds.inherited import Inherited, look_through
from hybridtrain.engine.worlds.parent_death import end_with_engine
from hybridtrain.engine.worlds.process_world import BeginAnew
from hybridtrain.engine.worlds.signals import Interrupted, wait_unless_signalled
from hybridtrain.engine.worlds.start_workers import RestartPoint
from hybridtrain.errors import UserError
from hybridtrain.hosts.other_hosts import Hosts
from hybridtrain.hosts.relay import Relay
from hybridtrain.lightning.checkpointing.slurm_requeue import Warned, listen, warnings_noted
from hybridtrain.lightning.failover.rejoin import MEMORY, Rejoin
from hybridtrain.lightning.failover.rng_mailbox import RngMailbox
from hybridtrain.lightning.fault_injection.in_worker import inject, interrupt_updates
from hybridtrain.lightning.hooks.faster_hooks import speed_up_hooks
from hybridtrain.lightning.hooks.stop_iteration import refuse_stray_stop_iteration
from hybridtrain.lightning.hooks.trainer_hooks import (
    GlobalState,
    Launcher,
    TunerExit,
    leave_signals_alone,
    tear_down,
)
from hybridtrain.lightning.host_memory_strategy import HostMemoryStrategy
from hybridtrain.lightning.hosts.joining import joined, results_of, with_other_hosts
from hybridtrain.lightning.participation.gathered_dictionaries import gathering_by_keys
from hybridtrain.lightning.preflight.machine_checks import check_startup
from hybridtrain.lightning.preflight.strategy_checks import (
    check_lock_free,
    check_own_parameters,
    check_parameters,
    check_renormalised,
    check_trainer,
    check_transport,
)
from hybridtrain.lightning.results.worker_result import pack, save_finished, unpack, whole
from hybridtrain.lightning.states.held_objects import HeldObjects
from hybridtrain.lightning.states.logger_state import logger_states, logs_open
from hybridtrain.lightning.step_profiler import leave_profile, profiled, watch_worker
from hybridtrain.lightning_package import told_to_children
from hybridtrain.util.cleanup import vanishing_sockets


class HybridLauncher(Launcher):
    """Runs a trainer's function in W worker processes; serves and supervises them."""

    def __init__(self, strategy: HostMemoryStrategy) -> None:
        self._strategy = strategy

    @property
    def is_interactive_compatible(self) -> bool:
        """Forked workers need no script; spawned ones are checked before they start."""
        return True

    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: pl.Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run ``function`` in every worker; return worker 0's result."""
        strategy = self._strategy
        assert trainer is not None, "Lightning always passes its trainer"
        job = _TrainerCall(trainer, strategy, function, args, kwargs)
        strategy.begin_run()
        if strategy.data_options["data_shards"] is not None:
            check_visits(strategy.requirements)
        if strategy.recording is not None and strategy.recording.instead is not None:
            if strategy.requirements.together > 1:
                raise UserError(
                    "the run had inside, under which workers of a host meet without the server, "
                    "and its record says nothing of that; it cannot be replayed"
                )
            if strategy.recording.instead.rehearses:
                check_all(strategy, trainer)
            strategy.faults.begin(trainer, strategy.world_size, rehearses=True)
            return self._play(strategy.recording.instead, job)
        handled = sys.exception()  # by the user's code, which may look at it
        try:
            return self._train(job)
        except BaseException as error:
            clear_frames_of(error, handled)
            raise

    def _train(self, job: _TrainerCall) -> Any:
        """Run the job in worker processes; return worker 0's result."""
        strategy, trainer = self._strategy, job.trainer
        method = resolve_start_method(strategy.start_method)
        start = StartOptions(method, threads_of_a_worker(strategy, strategy.local_workers))
        check_all(strategy, trainer)
        end_with_engine()
        strategy.faults.begin(trainer, strategy.world_size)
        job.global_state = carried(trainer, method)
        scratch = Scratch(apart=strategy.node_rank > 0)
        job.room = scratch.path
        check_startup(strategy.run_setup, start, usable_cores(), job)
        job.look_through(forked=method == "fork")
        held = HeldObjects(trainer, job.given())
        try:
            if strategy.node_rank > 0:
                results = self._relay(job, start)
            else:
                train = partial(self._begin, job, start)
                setup, given, stats = strategy.run_setup, job.given(), strategy.run_stats
                complete = partial(whole, scratch)
                results = with_other_hosts(setup, trainer, given, train, complete, stats)
        except Interrupted as interruption:
            self._interrupt(interruption, trainer, held, scratch)
        return self._take_home(trainer, results, held, scratch, job.given())

    def _begin(self, job: _TrainerCall, start: StartOptions, others: Hosts | None) -> list[Any]:
        """Train, and begin anew if all workers are lost before any has told its progress."""
        judge = Judge(self._strategy.on_failure)
        while True:
            try:
                return self._run(job, judge, start, others)
            except BeginAnew as lost:
                wait_unless_signalled(lost.delay_s)

    def _relay(self, job: _TrainerCall, start: StartOptions) -> list[Any]:
        """Serve the workers of this host; return the results of all workers."""
        strategy, trainer = self._strategy, job.trainer
        with joined(strategy.run_setup, trainer, job.given()) as connection:
            job.instead = connection.about["from"]
            relay = Relay(
                connection,
                strategy.numbers_here,
                strategy.world_size,
                strategy.requirements,
                start.method,
                start.threads,
                Watchdog(strategy.patience),
                device_names_of(strategy),
                strategy.stop_grace_s,
                strategy.data_options["host_sums"] and len(strategy.numbers_here) > 1,
            )
            with surroundings(job, start.method):
                over = relay.run(partial(_body_of, job))
            strategy.remember_stats(over.stats)
            return results_of(over)

    def _run(
        self, job: _TrainerCall, judge: Judge, start: StartOptions, others: Hosts | None
    ) -> list[Any]:
        """Train with new workers; return their results."""
        strategy, trainer = self._strategy, job.trainer
        on_cpu = isinstance(trainer.accelerator, CPUAccelerator)
        computing = start.threads if on_cpu else 1  # a core queues a device's work
        in_update = threads_of_an_update(strategy, strategy.local_workers, computing)
        traffic = None if others is None else others.stats
        server = serving(strategy, trainer.state.fn == "fit", start.threads, in_update, traffic)
        interrupt_updates(server, strategy.faults)
        with profiled(trainer, server, strategy.world_size):
            own = workers_may_update(strategy) and not strategy.faults.in_updates and others is None
            own = own or strategy.requirements.together > 1
            device_names = device_names_of(strategy)
            world = world_of(strategy, server, judge, start, device_names, own, others)
            try:
                with surroundings(job, start.method):
                    return world.run(partial(_run_in_process, job), partial(_run_again, job))
            finally:
                error = sys.exc_info()[0]
                here = None if others is None else strategy.numbers_here
                faults = {} if error is BeginAnew else strategy.faults.conclude(error is None, here)
                kept = strategy.keeping.figures() | strategy.device_memory.figures()
                strategy.remember_stats(server.statistics.stats() | faults | kept)

    def _interrupt(
        self, interruption: Interrupted, trainer: pl.Trainer, held: HeldObjects, scratch: Scratch
    ) -> NoReturn:
        """A signal ended the run: save what is finished, then raise what Lightning raises."""
        self._strategy.interrupt(interruption.signum)
        remember, keeping = self._strategy.remember_training, self._strategy.keeping
        save_finished(trainer, interruption.results, held, remember, keeping, scratch)
        if interruption.signum != signal.SIGINT:
            sys.exit(128 + interruption.signum)
        raise KeyboardInterrupt from None

    def _play(self, instead: Runner, job: _TrainerCall) -> Any:
        """Run the workers in this process."""
        self._strategy.keeping.is_whole()
        held = HeldObjects(job.trainer, job.given())
        with gathering_by_keys():
            results = instead.play(self._strategy, lambda copy: partial(_run_in_worker, copy), job)
        if not results:
            return None
        return self._take_home(job.trainer, results, held, None, job.given())

    def _take_home(
        self,
        trainer: pl.Trainer,
        results: list[Any],
        held: HeldObjects,
        scratch: Scratch | None,
        given: dict[str, Any],
    ) -> Any:
        strategy = self._strategy
        remember, keeping = strategy.remember_training, strategy.keeping
        return unpack(trainer, results, held, remember, keeping, scratch, given)

    def kill(self, signum: Any) -> None:
        """Nothing: the parent sees the signal itself, and sends ``Stop`` to its workers."""


def clear_frames_of(error: BaseException, handled: BaseException | None = None) -> None:
    """Clear the variables of the frames that an exception and its causes have left.

    A notebook keeps the last exception, and with it would keep the run's shared memory.

    Args:
        handled: stays as it is, with its own causes.
    """
    seen, due = {id(handled)}, [error, error.__cause__, error.__context__]
    while due:  # an exception may be its own cause
        if (each := due.pop()) is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            due += [each.__cause__, each.__context__]


@contextmanager
def surroundings(job: _TrainerCall, start_method: str) -> Iterator[None]:
    """Resources that exist while workers run, and what the job tells workers of them."""
    strategy, trainer = job.strategy, job.trainer
    with (
        strategy.keeping.listening(trainer),
        told_to_children(),
        vanishing_sockets(),
        strategy.device_memory.measured(strategy.parallel_devices or [], strategy.local_workers),
        pages_of(strategy, trainer),
        logs_open(trainer),
        warnings_noted(strategy.cluster_environment) as job.warned,
    ):
        job.loggers = logger_states(trainer) if start_method == "fork" else []
        yield


@contextmanager
def pages_of(strategy: HostMemoryStrategy, trainer: pl.Trainer) -> Iterator[None]:
    """RNG states in shared memory, for runs in which a worker may be replaced."""
    restarts = strategy.on_failure.choice == "restart"
    if not (strategy.requirements.whole_rounds and restarts and trainer.state.fn == "fit"):
        yield
        return
    pages = RngMailbox(strategy.world_size)
    with closing(pages), strategy.exchanging_rng(pages):
        yield


def device_names_of(strategy: HostMemoryStrategy) -> list[str]:
    """The devices of this host's workers, in words."""
    devices = list(map(str, strategy.parallel_devices or [])) or ["cpu"]
    return [devices[number % len(devices)] for number in range(strategy.local_workers)]


def check_all(strategy: HostMemoryStrategy, trainer: pl.Trainer) -> None:
    """Refuse contradicting options before a process is started; raises UserError."""
    setup = strategy.run_setup
    check_trainer(trainer, setup)
    if strategy.requirements.in_place:
        check_lock_free(trainer, strategy.world_size)
    check_transport(setup)
    if strategy.requirements.parameters == "own":
        check_own_parameters(setup, trainer)
    check_sizes(strategy.data_options["batch_size_per_worker"], strategy.world_size)
    check_parts(strategy)
    strategy.faults.check(strategy.requirements, strategy.world_size)
    check_parameters(trainer.lightning_module)
    if trainer.state.fn == "fit":
        module = trainer.lightning_module
        check_renormalised(module, strategy.requirements, strategy.world_size)


def carried(trainer: pl.Trainer, start_method: str) -> GlobalState | None:
    """Lightning's process-wide state for spawned workers; forked ones inherit it."""
    if start_method == "fork":
        return None
    trainer.lightning_module.cpu()  # or a handle to the device's memory would be sent
    return GlobalState.capture()


# ---- inside a worker ----------------------------------------------------------------------------


@dataclass
class _TrainerCall:
    """The job that every worker gets."""

    trainer: pl.Trainer
    strategy: HostMemoryStrategy  # the trainer's
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    global_state: GlobalState | None = None
    loggers: list[dict[str, Any]] = field(default_factory=list)
    version: int = 0  # updates so far, for a restarted worker
    progress: bytes = b""  # the state of training, for a restarted worker
    warned: Warned | None = None  # by SLURM, that the job is about to end
    room: str = ""  # the path of a scratch file for results too large for a message
    instead: dict[str, Any] = field(default_factory=dict)  # of host 0: where all go on from
    inherited: Inherited = field(default_factory=Inherited)

    def given(self) -> dict[str, Any]:
        """The arguments of the function."""
        return signature(self.function).bind(*self.args, **self.kwargs).arguments | self.instead

    def named(self) -> dict[str, Any]:
        """The parts, by their names for users."""
        trainer: Any = self.trainer
        given: dict[str, Any] = {"model": trainer.lightning_module}
        given |= self.given()
        given |= {f"callbacks[{n}]": callback for n, callback in enumerate(trainer.callbacks)}
        given |= {f"loggers[{n}]": logger for n, logger in enumerate(trainer.loggers)}
        return given | {"strategy": self.strategy, "trainer": trainer}

    def look_through(self, forked: bool) -> None:
        """Look at what workers inherit; warn of what they cannot use."""
        parts = self.named()  # data, model and callbacks; what follows may lead to anything
        loggers = [name for name in parts if name.startswith("loggers[")]
        beyond = [parts.pop(name) for name in ("trainer", "strategy", *loggers)]
        n_workers, data = self.strategy.local_workers, self.given().keys() - {"model"}
        self.inherited = look_through(parts, data, n_workers, forked, beyond)
        for line in self.inherited.lines:
            rank_zero_warn(line)


def _run_in_process(job: _TrainerCall, client: Client) -> Any:
    """In a process of its own; not called in a replay."""
    speed_up_hooks()
    refuse_stray_stop_iteration(job.trainer)
    with job.inherited.owned(), gathering_by_keys():
        return _run_in_worker(job, client)


def _run_in_worker(job: _TrainerCall, client: Client) -> Any:
    if job.global_state is not None:
        job.global_state.restore()
        stop_sharing(job.trainer.lightning_module)
    os.environ["LOCAL_RANK"] = str(client.worker - job.strategy.first_worker)
    forget_process_group()
    trainer: Any = job.trainer
    strategy = job.strategy
    held = HeldObjects(trainer, job.given())
    for logger, state in zip(trainer.loggers, job.loggers, strict=False):
        vars(logger).update(state)
    leave_signals_alone(trainer)  # the parent handles them
    whole_rounds = strategy.requirements.whole_rounds
    back = None
    if job.progress:
        back = Rejoin(job.progress, job.version, trainer, client, whole_rounds)
    end = strategy.enter_worker(client, trainer, back)
    inject(trainer, client, strategy.faults, strategy, strategy.current_session)
    listen(trainer, job.warned, strategy.saving_alone)
    watch_worker(trainer, client, strategy, strategy.current_session)
    reset_seed()  # as every rank does under ddp: dropout and noise are drawn alike
    try:
        resumed = {} if back is None else {"ckpt_path": MEMORY}
        returned = job.function(**job.given() | resumed)
        client.gather("the way home", None)  # or the packing worker could be lost unnoticed
        return pack(trainer, strategy.end_training(), returned, held, job.room)
    except TunerExit:  # after a search for a learning rate without training
        tear_down(trainer)
        return pack(trainer, strategy.end_training(), None, held, job.room)
    except StopRequested as stop:
        strategy.exchange_last_steps()
        end.stop(stop)
        raise
    except BaseException as error:
        end.fail(error)
        raise
    finally:
        leave_profile(trainer, client.worker)


def _body_of(job: _TrainerCall, restart: RestartPoint | None) -> Callable[[Client], Any]:
    """The work of a worker, or of one that replaces a lost one."""
    return partial(_run_in_process, job) if restart is None else _run_again(job, *restart)


def _run_again(job: _TrainerCall, progress: bytes, version: int) -> Callable[[Client], Any]:
    """The work of a worker that replaces a lost one."""
    return partial(_run_in_process, replace(job, progress=progress, version=version))


@torch.no_grad()
def stop_sharing(module: torch.nn.Module) -> None:
    """Give a spawned worker's module its own memory: torch sends tensors as shared memory."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.clone()


def forget_process_group() -> None:
    """Drop a default process group that a forked worker has inherited from an earlier ddp run.

    It has no peers here, and with one Lightning would broadcast on every mini-batch.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        distributed_c10d.GroupMember.WORLD = None
