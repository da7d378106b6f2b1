"""While worker 0 is lost, the remaining worker with the lowest number logs, saves and reports.

Lightning asks in many places, in some only once, whether the process has rank 0.
"""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
from lightning_utilities.core.rank_zero import rank_zero_only
from pytorch_lightning.callbacks import ProgressBar

from hybridtrain.engine.worker.surroundings import Listeners
from hybridtrain.engine.worker.worker_group import WorkerGroup
from hybridtrain.lightning.collectives import Collectives
from hybridtrain.lightning.due_steps import rows_of
from hybridtrain.lightning.states.logger_state import identity, keep_rows


def know_the_loggers(trainer: pl.Trainer, collectives: Collectives) -> None:
    """Let all workers' loggers write to the places of worker 0's."""
    for logger in trainer.loggers:
        _ = logger.version  # chosen now, if it has not been
    known = collectives.broadcast([identity(logger) for logger in trainer.loggers], 0)
    for logger, content in zip(trainer.loggers, known, strict=True):
        vars(logger).update(content)


class LeaderFailover:
    """Gives this worker rank 0's duties while it has the lowest number.

    Args:
        trainer: of this worker.
        group: knows the lost workers.
        listeners: of this worker.
    """

    def __init__(self, trainer: pl.Trainer, group: WorkerGroup, listeners: Listeners) -> None:
        self._trainer: Any = trainer
        self._group, self._leads = group, group.worker == 0
        listeners.on_change(self._look)
        self._look()  # a new process may begin with the lowest number

    def _look(self) -> None:
        before, self._leads = self._leads, self._group.is_leader
        if before != self._leads:
            rank = 0 if self._leads else self._group.worker
            rank_zero_only.rank = rank  # type: ignore[attr-defined]
            self._take_over() if self._leads else self._step_down()

    def _take_over(self) -> None:
        trainer = self._trainer
        for logger in trainer.loggers:
            keep_rows(logger)
        if (rows := rows_of(trainer)) is not None:
            rows.pass_over(self._group.lost_at)
        for callback in trainer.callbacks:
            if isinstance(callback, ProgressBar):
                callback.enable()
                callback.on_train_start(trainer, trainer.lightning_module)
        become_leader(trainer)

    def _step_down(self) -> None:
        for callback in self._trainer.callbacks:
            if isinstance(callback, ProgressBar):
                callback.disable()


def become_leader(trainer: Any) -> None:
    """Let callbacks that write files continue with those of another process."""
    for callback in trainer.callbacks:
        if (succeed := getattr(callback, "succeed", None)) is not None:
            succeed(trainer)
