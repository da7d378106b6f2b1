"""The end of an epoch in a run that resumes from a checkpoint.

Lightning's checkpoints hold no metrics. So a callback may not find its monitored metric before the
next validation, and Lightning skips schedulers that need one (``ReduceLROnPlateau``) at the end of
the resumed epoch, and of an epoch whose checkpoint a callback wrote at its very end. Under our key
a checkpoint holds the metrics, and these scheduler steps are made.

After a checkpoint written at the end of a mini-batch, Lightning skips the validation that is due,
and after the last mini-batch the end of the epoch. Here both are made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hybridtrain.lightning.checkpointing.epoch_position import EpochPosition
from hybridtrain.lightning.checkpointing.epoch_state import EpochEvent, EpochState, is_in_end_hook
from hybridtrain.lightning.checkpointing.saved_schedules import SavedSchedules
from hybridtrain.lightning.hooks.loop_hooks import (
    callback_metrics,
    is_at_last_batch,
    log_connector,
    set_logged_step,
    set_restarting,
    validate_from_beginning,
    validation_is_due,
)
from hybridtrain.lightning.hooks.points import Point, around, before


class EpochIsOver(StopIteration):
    """By the checkpoint, the epoch is over for all workers; Lightning ends the loop."""


class EpochEnds:
    """Makes the missing parts of a resumed epoch's end in one worker.

    Args:
        trainer: of this worker.
        position: of this worker in the epoch.
        device: of this worker, where metrics are restored.
    """

    def __init__(self, trainer: Any, position: EpochPosition, device: torch.device) -> None:
        self._trainer, self._position, self._device = trainer, position, device
        self._found: dict[str, torch.Tensor] = {}  # the checkpoint's metrics
        self._stepped: int | None = None  # mini-batches with a step, if Lightning miscounts
        # Before an epoch's schedules, and behind them.
        self._kept: tuple[int, SavedSchedules, SavedSchedules] | None = None
        before(Point.FIT_RESET, trainer.fit_loop, self.settle)
        before(Point.BATCH, trainer.fit_loop.epoch_loop, self.go_on)
        before(Point.COLLECT, log_connector(trainer), self.allow)
        around(Point.SCHEDULERS, trainer.fit_loop.epoch_loop, self.keep_schedules)

    def state(self) -> dict[str, torch.Tensor]:
        """The metrics as last collected: to collect anew, all workers would have to meet."""
        known = callback_metrics(self._trainer).items()
        return {name: value.detach().cpu().clone() for name, value in known}

    def keep(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over a checkpoint's metrics; ``position`` has its epoch."""
        self._found, resumed = dict(state), self._position.resumed
        self._stepped = None if resumed is None else resumed.stepped

    def begin_batch(self) -> None:
        """A mini-batch begins, or the epoch has no more."""
        if self._stepped is not None:
            set_logged_step(self._trainer, self._stepped)
            self._stepped = None

    def keep_schedules(
        self, proceed: Callable[..., None], interval: str, update_plateau_schedulers: bool
    ) -> None:
        """Keep schedules by epoch as before this worker's last mini-batch; others may have more."""
        if interval == "epoch" and not update_plateau_schedulers:
            kept = SavedSchedules.of(self._trainer, by_step=False)
            proceed(interval, update_plateau_schedulers)
            now = SavedSchedules.of(self._trainer, by_step=False)
            self._kept = self._position.epoch, kept, now
        else:
            proceed(interval, update_plateau_schedulers)

    def reopened(self, checkpoint: dict[str, Any], epoch: int) -> dict[str, Any]:
        """The checkpoint with schedules by epoch as before this worker's last mini-batch of it."""
        if self._kept is None or self._kept[0] != epoch:
            return checkpoint
        _, kept, after = self._kept
        now = SavedSchedules.of(self._trainer, by_step=False)
        return kept.with_changes(after, now).give(checkpoint)

    def settle(self) -> None:
        """Counters and schedulers are restored: restore metrics, step schedulers left out."""
        found, self._found = self._found, {}
        known = callback_metrics(self._trainer)
        known.update({name: value.to(self._device) for name, value in found.items()})
        loop = self._trainer.fit_loop
        if found and _was_ending(self._trainer) and self._all_known():
            loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)

    def go_on(self) -> None:
        """After the checkpoint's last mini-batch: validate, end the epoch, or continue it.

        Lightning would skip the first two.

        Raises:
            EpochIsOver: so that Lightning ends the epoch.
        """
        state, resumed = self._position.state, self._position.resumed
        if resumed is None or not self._position.on(EpochEvent.GOES_ON):
            return
        loop = self._trainer.fit_loop.epoch_loop
        if resumed.loaders is None or not loop.restarting:
            return
        over = state is EpochState.RESUMED_AT_END
        due = not over and validation_is_due(self._trainer)
        if due and state is EpochState.RESUMED_IN_HOOK:
            validate_from_beginning(self._trainer)
        if not due:
            self.begin_batch()  # hooks of the mini-batch that begins may log
            if over or loop.batch_progress.is_last_batch:
                raise EpochIsOver

    def allow(self) -> None:
        """Let the resumed epoch end like any other."""
        loop = self._trainer.fit_loop
        if self._trainer.training and loop.restarting and not loop.restarted_on_epoch_end:
            set_restarting(loop, not self._all_known())

    def _all_known(self) -> bool:
        monitored = {
            config.monitor
            for config in self._trainer.lr_scheduler_configs
            if config.reduce_on_plateau and config.interval == "epoch"
        }
        # Collected only where Lightning is about to collect, too: all workers may meet for it.
        return not monitored or monitored <= self._trainer.callback_metrics.keys()


def _was_ending(trainer: Any) -> bool:
    """Whether only the part of the epoch after its callbacks was left."""
    counted = is_in_end_hook(vars(trainer.fit_loop.epoch_progress.current))
    return counted and is_at_last_batch(trainer)
