"""What the launcher may do instead of starting processes: run all workers in this one, on threads.

Every worker gets a copy of trainer, module and data, as if they had been sent to a process of its
own, and runs Lightning's loops on them.
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
    """Runs the workers in its own way.

    Args:
        record: of the run that it is about.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        self.outcome: T | None = None
        self.error: BaseException | None = None

    def __deepcopy__(self, memo: Any) -> InProcessRunner[T]:
        return self  # workers need no copy

    @abstractmethod
    def run(self, server: Server, stamp: Stamp, bodies: Sequence[Body]) -> tuple[T, list[Any]]:
        """What came of it, and what the workers brought home (nothing, if they did not)."""

    def play(self, strategy: RunContext, body: Callable[[Any], Body], job: Any) -> list[Any]:
        """Run it; what the workers brought home, or nothing if they did not come to it.

        Args:
            strategy: of this trainer.
            body: makes a worker's body from its copy of the job.
            job: what every worker gets a copy of.
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
        except BaseException as error:  # the launcher's callers would make a checkpoint of it
            self.error = error
            return []
        return results

    def fit(self, trainer: pl.Trainer, module: pl.LightningModule, **options: Any) -> T:
        """``trainer.fit``, with this instead of processes.

        Raises:
            BaseException: what it or a worker has raised.
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
    """A job of a worker's own, as a process of its own would have.

    Raises:
        UserError: if something in it cannot be copied.
    """
    # Lightning's own dummy answers to any name, even to that of the method that would copy it.
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


# What the glue and Lightning keep once in a process.
CELLS = (
    Cell(partial(getattr, rank_zero_only, "rank", None), _set_rank),
    Cell(lambda: HostBatchNorm.collectives, _set_collectives),
)
