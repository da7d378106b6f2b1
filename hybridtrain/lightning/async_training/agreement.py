"""Agreements of free-running workers at their meetings.

Lightning asks every callback in every worker and expects the same decisions. But free-running
workers see different steps, losses and clocks: one has reached ``max_time`` while another waits at
the end of the epoch and would begin the next one alone. So if one worker wants to stop, all stop.

``ModelCheckpoint`` even meets within its decisions (whether a file exists, whether a metric is
among the best). The files are worker 0's, so all take over the state of its callbacks. And because
``global_step`` counts all workers' updates, a worker's first step at or after a multiple of
``every_n_train_steps`` counts as that multiple.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridtrain.lightning.async_training.counting import UpdateCount
from hybridtrain.lightning.checkpointing.epoch_ends import EpochIsOver
from hybridtrain.lightning.collectives import Collectives
from hybridtrain.lightning.due_steps import files_of
from hybridtrain.lightning.hooks.loop_hooks import (
    has_ended_epoch,
    logged_step,
    set_logged_step,
    validates_this_epoch,
)
from hybridtrain.lightning.hooks.points import Point, around
from hybridtrain.lightning.run_context import checkpoints_of
from hybridtrain.lightning.states.callback_state import give_state, standing_of
from hybridtrain.lightning.step.session import Session


def agree(session: Session | None, count: UpdateCount | None, collectives: Collectives) -> None:
    """All workers meet, at the same parameters. In lock-step there is nothing to agree on."""
    if session is None or count is None:
        return
    trainer = session.trainer
    send_writes(session, count)
    trainer.should_stop = collectives.decide(trainer.should_stop, all_must_agree=False)
    count.reach(session.meet())
    count.by_hand.meet()
    know_the_files(trainer, collectives)  # no worker trains on before all have pulled


def send_writes(session: Session | None, count: UpdateCount | None, starts: bool = False) -> None:
    """Where workers run freely, send what user code has written to parameters."""
    if session is not None and count is not None:
        version = session.send_writes(starts)
        if version is not None:
            count.reach(version)


class Validations:
    """All workers validate, or none, although their epochs end at different mini-batches.

    Args:
        trainer: of this worker.
        collectives: of this worker.
        synchronize: meets all workers at the end of an epoch.
        behind_last: called before a validation that follows the epoch's last mini-batch.
    """

    def __init__(
        self,
        trainer: Any,
        collectives: Collectives,
        synchronize: Callable[[bool], None],
        behind_last: Callable[[], None],
    ) -> None:
        self._trainer, self._collectives = trainer, collectives
        self._synchronize, self._behind_last = synchronize, behind_last
        self._decided: tuple[int, bool] | None = None  # the epoch, and its decision
        around(Point.VALIDATION_DUE, trainer.fit_loop.epoch_loop, self.is_due)
        around(Point.BATCH, trainer.fit_loop.epoch_loop, self.advance)

    def is_due(self, proceed: Callable[[Any], bool], fetcher: Any) -> bool:
        """Whether to validate after this mini-batch, if it is this worker's last."""
        if not validates_this_epoch(self._trainer) or not has_ended_epoch(self._trainer):
            return False
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        at_end = progress.is_last_batch or proceed(fetcher)  # the end may come before a limit
        return self._decide(progress.current.ready > 0 and bool(at_end))

    def _decide(self, mine: bool) -> bool:
        """Whether a validation is due in any worker. All meet, once in an epoch."""
        epoch = self._trainer.fit_loop.epoch_progress.total.ready
        if self._decided is None or self._decided[0] != epoch:
            self._synchronize(True)
            self._decided = epoch, self._collectives.decide(mine, False)
        if self._decided[1]:
            self._behind_last()
        return self._decided[1]

    def advance(self, proceed: Callable[[Any], None], fetcher: Any) -> None:
        """Lightning's, and the decision of a worker without a mini-batch."""
        trainer = self._trainer
        try:
            proceed(fetcher)
        except EpochIsOver:
            raise
        except StopIteration:  # no mini-batch is left for this worker; Lightning skips validation
            if validates_this_epoch(trainer) and self._decide(False):
                step = logged_step(trainer)
                trainer.fit_loop.epoch_loop.on_advance_end(fetcher)
                set_logged_step(trainer, step)
            raise


def know_the_files(trainer: Any, collectives: Collectives) -> None:
    """All meet and take over the ``ModelCheckpoint`` states of worker 0, or the first not lost."""
    callbacks = checkpoints_of(trainer)
    module = trainer.lightning_module
    mine = [(standing_of(each, module), files_of(each).since) for each in callbacks]
    for callback, known in zip(callbacks, collectives.broadcast(mine, 0), strict=True):
        state, since = known
        give_state(callback, module, state)
        files_of(callback).reach(since)
