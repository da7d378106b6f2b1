"""What workers that run freely agree on wherever all of them meet.

Lightning asks every callback in every worker, and expects that all come to the same decisions. But
workers that run freely see other steps, other losses and other clocks: one has reached ``max_time``
where another waits for the end of the epoch already, and would begin the next one alone. So if one
worker wants to stop, all stop.

``ModelCheckpoint`` even meets in the midst of its decisions (whether a file exists, whether a
metric is among the best). What is in the files is what worker 0 had; so all take over what its
callbacks know. And since updates are counted that others have made, a multiple of
``every_n_train_steps`` is reached at a worker's first step that is not before it.
"""

from __future__ import annotations

from typing import Any

from pytorch_lightning.callbacks import ModelCheckpoint

from hybridtrain.lightning.async_training.counting import UpdateCount
from hybridtrain.lightning.async_training.update_count import multiples, precede
from hybridtrain.lightning.checkpointing.epoch_ends import EpochIsOver
from hybridtrain.lightning.collectives import Collectives
from hybridtrain.lightning.hooks.callback_hooks import save_every, saves_every
from hybridtrain.lightning.hooks.loop_hooks import (
    has_trained_epoch,
    logged_step,
    replace_validation_check,
    set_logged_step,
    validates_this_epoch,
)
from hybridtrain.lightning.results.callback_state import give_state, standing_of
from hybridtrain.lightning.run_context import WorkerContext, checkpoints_of
from hybridtrain.lightning.step.session import Session


def agree(session: Session | None, count: UpdateCount | None, collectives: Collectives) -> None:
    """All workers meet, at the same parameters. In lock-step nobody counts others' updates."""
    if session is None or count is None:
        return
    trainer = session.trainer
    trainer.should_stop = collectives.decide(trainer.should_stop, all_must_agree=False)
    count.reach(session.pull())
    count.by_hand.meet()
    know_the_files(trainer, collectives)  # nobody moves parameters before all have read them


class Validations:
    """All workers validate, or none: their epochs end at other mini-batches, or without any.

    Args:
        trainer: of this worker.
        strategy: of this worker.
    """

    def __init__(self, trainer: Any, strategy: WorkerContext) -> None:
        self._trainer, self._strategy = trainer, strategy
        loop = trainer.fit_loop.epoch_loop
        self._decided: tuple[int, bool] | None = None  # in which epoch, and how
        self._alone = replace_validation_check(trainer, self._is_due)
        self._advance, loop.advance = loop.advance, self._go_on

    def _is_due(self, fetcher: Any) -> bool:
        """Whether to validate behind this mini-batch, which may be the last of this worker."""
        if not validates_this_epoch(self._trainer):
            return False
        mine = bool(self._alone(fetcher))
        return self._decide(mine) if mine or has_trained_epoch(self._trainer) else False

    def _decide(self, mine: bool) -> bool:
        """Whether anybody has come to where a validation is due. Once in an epoch, all meet."""
        epoch = self._trainer.fit_loop.epoch_progress.total.ready
        if self._decided is None or self._decided[0] != epoch:
            self._strategy.align(ends=True)
            self._decided = epoch, self._strategy.reduce_boolean_decision(mine, all=False)
        if self._decided[1]:
            self._strategy.validate_behind_last()
        return self._decided[1]

    def _go_on(self, fetcher: Any) -> None:
        trainer = self._trainer
        try:
            self._advance(fetcher)
        except EpochIsOver:
            raise
        except StopIteration:  # there is none (any more) for this worker, which Lightning lets go
            if validates_this_epoch(trainer) and self._decide(False):
                step = logged_step(trainer)
                trainer.fit_loop.epoch_loop.on_advance_end(fetcher)
                set_logged_step(trainer, step)
            raise


def know_the_files(trainer: Any, collectives: Collectives) -> None:
    """A meeting of all: the files are worker 0's, or those of the first who is there."""
    callbacks = checkpoints_of(trainer)
    module = trainer.lightning_module
    mine = [(standing_of(each, module), vars(_multiples(each))) for each in callbacks]
    for callback, known in zip(callbacks, collectives.broadcast(mine, 0), strict=True):
        state, since = known
        give_state(callback, module, state)
        vars(_multiples(callback)).update(since)


class Multiples(int):
    """As ``every_n_train_steps``: no remainder for the first step at or behind a multiple."""

    since = 0  # the last step that was asked for

    def __rmod__(self, step: int) -> int:
        before, self.since = self.since, step
        return 0 if multiples(int(self), before, step) > 0 else 1


def count_all_updates(callback: ModelCheckpoint, trainer: Any) -> None:
    """A multiple may be an update that another worker has made."""
    every = Multiples(saves_every(callback))
    save_every(callback, every)

    def begin() -> None:
        every.since = trainer.global_step

    precede(callback, "on_train_start", begin)


def _multiples(callback: ModelCheckpoint) -> Multiples:
    """Its own, or some that nobody asks if the callback has come to the trainer in mid-run."""
    every = saves_every(callback)
    return every if isinstance(every, Multiples) else Multiples(every)
