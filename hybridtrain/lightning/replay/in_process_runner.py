"""Run all workers in the calling process, on threads, instead of starting processes.

Every worker gets a copy of trainer, module and data, as if sent to its own process, and runs
Lightning's loops on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, Generic, TypeVar

import pytorch_lightning as pl
from lightning_utilities.core.rank_zero import rank_zero_only
from pytorch_lightning.loggers.logger import DummyLogger

from hybridtrain.errors import UserError
from hybridtrain.lightning.collectives import Collectives
from hybridtrain.lightning.replay.recording import Recording
from hybridtrain.lightning.replay.run_record import make_server
from hybridtrain.lightning.run_context import RunContext, context_of
from hybridtrain.lightning.sync_batchnorm import HostBatchNorm
from hybridtrain.recording.record_file import Record
from hybridtrain.recording.recorder import Stamp
from hybridtrain.server.server import Server
from hybridtrain.worlds.in_process import Body, Cell
from hybridtrain.worlds.local.cpu_scheduling import one_thread

T = TypeVar("T")


class InProcessRunner(ABC, Generic[T]):
    """Base of replay and rehearsal.

    Args:
        record: of the run.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        self.outcome: T | None = None
        self.error: BaseException | None = None

    def __deepcopy__(self, memo: Any) -> InProcessRunner[T]:
        return self  # workers share it

    @abstractmethod
    def run(self, server: Server, stamp: Stamp, bodies: Sequence[Body]) -> tuple[T, list[Any]]:
        """Run the workers; return the outcome and their results (none if they did not finish)."""

    def play(self, strategy: RunContext, body: Callable[[Any], Body], job: Any) -> list[Any]:
        """Run the workers; return their results, or none if they did not finish.

        Args:
            strategy: of this trainer.
            body: makes a worker's body from its copy of the job.
            job: copied for every worker.
        """
        try:
            bodies = [body(_copied(job)) for _ in range(self.record.n_workers)]
            stamp, threads = Stamp(), int(self.record.header["server_threads"])
            server = make_server(strategy, threads, partial(Server, clock=stamp))
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
        context = context_of(trainer)
        former = context.recording
        context.recording = Recording(self.record.path, instead=self)
        try:
            trainer.fit(module, **options)
        finally:
            context.recording = former
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


def _set_collectives(collectives: Collectives | None) -> None:
    HostBatchNorm.collectives = collectives


# Process-wide state of this package and of Lightning, which each worker needs for itself.
CELLS = (
    Cell(partial(getattr, rank_zero_only, "rank", None), _set_rank),
    Cell(lambda: HostBatchNorm.collectives, _set_collectives),
)
