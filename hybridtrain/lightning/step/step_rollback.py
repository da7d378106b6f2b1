"""Undo Lightning's counters and schedulers if a step is aborted.

In lock-step a worker may go on before the release of its step (see
:mod:`hybridtrain.lightning.step.overridden_hooks`), and Lightning counts the step and its
mini-batch, lets schedulers step, and even ends the epoch. The release is awaited before the next
mini-batch is fetched, because data sets may hold the module. If another worker stops or is lost,
the round is aborted. Then all of these get the values that they had in the step, as in a worker
that waits there: the mini-batch is under way, and a run resumed from a checkpoint repeats it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from hybridtrain.engine.worker.pushes import Pushes
from hybridtrain.engine.worker.steps import Steps
from hybridtrain.lightning.checkpointing.committed_batches import CommittedBatches
from hybridtrain.lightning.hooks.loop_hooks import logged_step, set_logged_step
from hybridtrain.lightning.hooks.points import Point, before
from hybridtrain.lightning.step.session import Session


class StepRollback:
    """Undoes the aborted steps of one worker, whose training begins.

    Args:
        session: of this worker; has the buffers.
        steps: know whether a release is pending, and undo what depends on it.
        pushes: await it.
        committed: the mini-batches that the last step was made with.
    """

    def __init__(
        self, session: Session, steps: Steps, pushes: Pushes, committed: CommittedBatches
    ) -> None:
        trainer: Any = session.trainer
        self._trainer, self._steps, self._pushes = trainer, steps, pushes
        self._committed, self._session = committed, session
        self._schedules_kept = False  # since the step was made
        before(Point.SCHEDULERS, trainer.fit_loop.epoch_loop, self.keep_schedules)
        before(Point.FETCH, trainer.fit_loop.epoch_loop, self.settle)

    def settle(self) -> None:
        """Await the release of the last step, if parameters depend on it."""
        if self._steps.unsettled is not None:
            self._pushes.settle()

    def commit(self) -> None:
        """A step has been made, and Lightning will count it now."""
        self._committed.commit(self._session.has_unsent)
        self._schedules_kept = False
        if (offered := self._steps.unsettled) is not None:
            loop = self._trainer.fit_loop.epoch_loop
            counts = [counts.copy() for counts in _counts(self._trainer)]
            step, is_last = logged_step(self._trainer), loop.batch_progress.is_last_batch
            offered.undoing.append(partial(self._put_back, counts, step, is_last))

    def give_up(self) -> None:
        """Drop the unfinished step: restore the buffers that its mini-batches have changed.

        Their step was aborted or has raised, or they wait to be accumulated.
        """
        if self._committed.under_way and self._session.buffers is not None:
            self._session.buffers.put_back(self._steps.version)

    def _put_back(self, kept: list[dict[str, int]], step: int, is_last_batch: bool) -> None:
        for counts, values in zip(_counts(self._trainer), kept, strict=True):
            counts.update(values)
        set_logged_step(self._trainer, step)
        self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = is_last_batch
        self._committed.take_back()

    def keep_schedules(self) -> None:
        """Schedulers may step now, ahead of the release."""
        configs, offered = self._trainer.lr_scheduler_configs, self._steps.unsettled
        if offered is None or self._schedules_kept or not configs:
            return
        self._schedules_kept = True
        for config in configs:
            undo = partial(config.scheduler.load_state_dict, config.scheduler.state_dict())
            offered.undoing.append(undo)


def _counts(trainer: Any) -> Iterator[dict[str, int]]:
    """Yield Lightning's counters of epochs, mini-batches, schedulers and steps, to be changed."""
    loop = trainer.fit_loop.epoch_loop
    steps = loop.automatic_optimization.optim_progress.optimizer.step
    epochs, batches = trainer.fit_loop.epoch_progress, loop.batch_progress
    for progress in (epochs, batches, loop.scheduler_progress, steps):
        yield from (vars(progress.total), vars(progress.current))
