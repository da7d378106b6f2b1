"""Repeat a recorded ``trainer.fit`` in this process, to the bit or under another policy.

All workers run on threads of this process. Every worker gets a copy of trainer, module and data, as
if sent to its own process, and runs Lightning's loops on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytorch_lightning as pl
from lightning_utilities.core.rank_zero import rank_zero_only
from pytorch_lightning.loggers.logger import DummyLogger

from hybridtrain.engine.recording.record_file import Record
from hybridtrain.engine.recording.record_reader import find_record, read_record, times_of
from hybridtrain.engine.recording.recorder import Stamp
from hybridtrain.engine.recording.replayer import Replayed, Replayer
from hybridtrain.engine.recording.run_description import (
    Recording,
    check_replayable,
    check_same_data,
)
from hybridtrain.engine.recording.virtual_rerun import Rehearsal
from hybridtrain.engine.scheme import make_server
from hybridtrain.engine.server.server import ParameterServer
from hybridtrain.engine.server.timeline import Timeline
from hybridtrain.engine.worlds.cpu_scheduling import one_thread
from hybridtrain.engine.worlds.in_process import Body, Cell
from hybridtrain.errors import UserError
from hybridtrain.lightning.checkpointing.periodic import scheduled
from hybridtrain.lightning.results.worker_result import WorkerResult
from hybridtrain.lightning.run_context import strategy_of
from hybridtrain.lightning.strategy import HybridStrategy
from hybridtrain.lightning.sync_batchnorm import HostBatchNorm
from hybridtrain.util.own_parts import identity
from hybridtrain.virtual.service_times import Measured

T = TypeVar("T")


@dataclass(eq=False)
class InProcessRunner(Generic[T]):
    """Runs all workers of a fit in this process.

    Args:
        record: of the run.
        run: lets the bodies of the workers run with a server and its clock; returns the outcome and
            their results (none if they did not finish).
        timeline: to be filled.
        rehearses: it is another run than the recorded one.
    """

    record: Record
    run: Callable[[ParameterServer, Stamp, Sequence[Body]], tuple[T, list[Any]]]
    timeline: Timeline | None = None
    rehearses: bool = False
    outcome: T | None = None
    error: BaseException | None = None

    def __deepcopy__(self, memo: Any) -> InProcessRunner[T]:
        return self  # workers share it

    def play(self, strategy: HybridStrategy, body: Callable[[Any], Body], job: Any) -> list[Any]:
        """Run the workers; return their results, or none if they did not finish.

        Args:
            strategy: of this trainer.
            body: makes a worker's body from its copy of the job.
            job: copied for every worker.
        """
        try:
            bodies = [body(_copied(job)) for _ in range(self.record.n_workers)]
            stamp, threads = Stamp(), int(self.record.header["server_threads"])
            kind = partial(ParameterServer, clock=stamp, timeline=self.timeline)
            server = make_server(strategy, threads, kind)
            try:
                with one_thread():
                    self.outcome, results = self.run(server, stamp, bodies)
                strategy.remember_stats(server.statistics.stats())
            finally:
                server.close()
        except BaseException as error:  # Lightning would handle it by writing a checkpoint
            self.error = error
            return []
        return results

    def fit(self, trainer: pl.Trainer, module: pl.LightningModule, **options: Any) -> T:
        """``trainer.fit``, with this in place of processes.

        Raises:
            BaseException: of the run or a worker.
        """
        recording = Recording(self.record.path, {}, self, self.record.n_hosts)
        with hybrid_strategy_of(trainer).playing(recording):
            trainer.fit(module, **options)
        if self.error is not None:
            raise self.error
        assert self.outcome is not None, "the launcher has played"
        return self.outcome


def _copied(job: Any) -> Any:
    """A worker's own copy of the job.

    Raises:
        UserError: if a part cannot be copied.
    """
    # Lightning's dummy has an attribute of any name, even of the method that copies.
    dummies = [each for each in job.trainer.loggers if isinstance(each, DummyLogger)]
    try:
        return deepcopy(job, {id(each): DummyLogger() for each in dummies})
    except Exception as error:
        raise UserError(
            "the trainer, the module or the data cannot be copied, and every worker of a replay "
            f"needs one of its own: {type(error).__name__}: {error}"
        ) from error


def _set_rank(rank: int | None) -> None:
    if rank is None:
        vars(rank_zero_only).pop("rank", None)
    else:
        rank_zero_only.rank = rank  # type: ignore[attr-defined]


# Process-wide state of this package and of Lightning, which each worker needs for itself.
CELLS = (
    Cell(partial(getattr, rank_zero_only, "rank", None), _set_rank),
    Cell(
        partial(getattr, HostBatchNorm, "collectives"),
        partial(setattr, HostBatchNorm, "collectives"),
    ),
)


# ---- to the bit ----------------------------------------------------------------------------------


def replay_fit(
    record: str | Path | Record,
    trainer: pl.Trainer,
    module: pl.LightningModule,
    anyway: bool = False,
    **options: Any,
) -> Replayed:
    """Repeat the recorded ``trainer.fit``, with a trainer made in the same way.

    Args:
        record: of the run: its directory, the file that ``record=`` has written, or what
            :func:`hybridtrain.engine.recording.read_record` has read.
        trainer: with a ``HybridStrategy``.
        module: as before training.
        anyway: even if code, versions or data differ.
        **options: as given to ``fit``.

    Raises:
        UserError: if something differs, naming it.
    """
    record = _read(record)
    _check(record, trainer, anyway)
    scheduled(trainer, record.told)
    return InProcessRunner(record, partial(_rerun, record, anyway)).fit(trainer, module, **options)


def _read(record: str | Path | Record) -> Record:
    return record if isinstance(record, Record) else read_record(find_record(record))


def _rerun(
    record: Record, anyway: bool, server: ParameterServer, stamp: Stamp, bodies: Sequence[Body]
) -> tuple[Replayed, list[Any]]:
    """Replay the record; ``anyway``: also with other data."""
    check_data = partial(check_same_data, record, anyway)
    report, results = Replayer(record, server, stamp, check_data, CELLS).run(bodies)
    finished = any(isinstance(each, WorkerResult) for each in results)  # worker 0 may be lost
    return report, results if report.equal and finished else []


def _check(record: Record, trainer: pl.Trainer, anyway: bool) -> None:
    check_replayable(record, hybrid_strategy_of(trainer), anyway)


def hybrid_strategy_of(trainer: pl.Trainer) -> HybridStrategy:
    """The strategy of a trainer whose run is replayed.

    Raises:
        UserError: if it is none of ours.
    """
    strategy = strategy_of(trainer)
    if not isinstance(strategy, HybridStrategy):
        kind = type(strategy).__name__
        raise UserError(f"{kind} was given, but only runs of HybridStrategy are replayed")
    return strategy


# ---- under another policy, in virtual time -------------------------------------------------------


def rehearse_fit(
    record: str | Path | Record,
    trainer: pl.Trainer,
    module: pl.LightningModule,
    timeline: Timeline | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train with workers as fast as the record's; the result is :meth:`RunStatistics.stats`.

    Args:
        record: of a run with as many workers; see :func:`replay_fit`.
        trainer: with a ``HybridStrategy`` of any policy.
        module: to be trained.
        timeline: to be filled.
        **options: as for ``fit``.

    Raises:
        UserError: if policy or exchange cannot be simulated, or the record says too little.
    """
    record = _read(record)
    _check_times(record, hybrid_strategy_of(trainer))
    runner = InProcessRunner(record, partial(_what_if, record), timeline, rehearses=True)
    return runner.fit(trainer, module, **options)


def _what_if(
    record: Record, server: ParameterServer, stamp: Stamp, bodies: Sequence[Body]
) -> tuple[dict[str, Any], list[Any]]:
    """Give workers their recorded times; the outcome is the server's statistics."""
    measured = Measured(times_of(record))
    times = [measured.stream(worker, 0) for worker in range(len(bodies))]
    results = Rehearsal(server, stamp, int(record.header["threads"]), times, CELLS).run(bodies)
    return server.statistics.stats(), results


def _check_times(record: Record, strategy: HybridStrategy) -> None:
    """The record has a time for each push, but none for the steps between two pushes."""
    recorded, each_step = record.strategy.get("exchange", "Gradient()"), ("Gradient()", "InPlace()")
    known = {recorded, given := identity(strategy.exchange)}
    if len(known) > 1 and not known <= {*each_step}:
        raise UserError(
            f"exchange={given} was given, and the run's was {recorded}; the record has "
            "a time for each push, not for each of a worker's own steps, so only strategies with "
            "the run's exchange can be tried with it; run the other one itself, or compare "
            "policies (hybrid, ssp, async, ...)"
        )
