"""The end of an epoch, in a run that goes on from a checkpoint.

Metrics are not in Lightning's checkpoints. A callback that monitors one may not find it before the
next validation, and Lightning leaves schedulers that wait for a metric (``ReduceLROnPlateau``) out
where it cannot know one: at the end of the epoch in which a run goes on, and of the one that was
over but for them when the checkpoint was written (by a callback, at the end of the epoch). Under
our key a checkpoint therefore holds the metrics as they were, and these steps are made.

Behind a checkpoint that was written at the end of a mini-batch Lightning leaves the validation out
that is due there, and behind the last mini-batch the end of the epoch. Here both come.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hybridtrain.lightning.async_training.update_count import precede
from hybridtrain.lightning.checkpointing.epoch_position import EpochPosition
from hybridtrain.lightning.data.epoch_state import EpochEvent, EpochState, is_in_end_hook
from hybridtrain.lightning.hooks.loop_hooks import (
    is_at_last_batch,
    set_logged_step,
    set_restarting,
    validate_from_beginning,
    validation_is_due,
)
from hybridtrain.lightning.hooks.result_hooks import callback_metrics, log_connector
from hybridtrain.lightning.run_context import context_of


class EpochIsOver(StopIteration):
    """For all workers, as the checkpoint says; Lightning ends the loop."""


class EpochEnds:
    """Of one worker.

    Args:
        trainer: of this worker.
        position: of this worker.
    """

    def __init__(self, trainer: Any, position: EpochPosition) -> None:
        self._trainer, self._position = trainer, position
        self._found: dict[str, torch.Tensor] = {}  # metrics in a checkpoint, to go on with
        self._stepped: int | None = None  # mini-batches with a step, if Lightning miscounts them

    def attach(self) -> None:
        """Stand in the way of training at its beginning, and of each epoch at its end."""
        precede(self._trainer.fit_loop, "reset", self._settle)
        precede(self._trainer.fit_loop.epoch_loop, "advance", self._go_on)
        precede(log_connector(self._trainer), "on_epoch_end", self._allow)

    def state(self) -> dict[str, torch.Tensor]:
        """The metrics as they were collected last, which is not done again: all would have to."""
        known = callback_metrics(self._trainer).items()
        return {name: value.detach().cpu().clone() for name, value in known}

    def keep(self, state: Mapping[str, torch.Tensor]) -> None:
        """This is what a checkpoint says of metrics; of the epoch ``position`` has heard."""
        self._found, resumed = dict(state), self._position.resumed
        self._stepped = None if resumed is None else resumed.stepped

    def begin_batch(self) -> None:
        """A mini-batch begins, or there is none any more."""
        if self._stepped is not None:
            set_logged_step(self._trainer, self._stepped)
            self._stepped = None

    def _settle(self) -> None:
        """Counters and schedulers have been restored."""
        found, self._found = self._found, {}
        device = context_of(self._trainer).root_device
        known = callback_metrics(self._trainer)
        known.update({name: value.to(device) for name, value in found.items()})
        loop = self._trainer.fit_loop
        if found and _was_ending(self._trainer) and self._all_known():
            loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)

    def _go_on(self) -> None:
        """Behind the last mini-batch of the checkpoint: a validation, the epoch's end, or others.

        Lightning would leave the first two out, or take what loaders have left.

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
        if over or (loop.batch_progress.is_last_batch and not due):
            self.begin_batch()
            raise EpochIsOver

    def _allow(self) -> None:
        """The epoch in which training has gone on ends as every other."""
        loop = self._trainer.fit_loop
        if self._trainer.training and loop.restarting and not loop.restarted_on_epoch_end:
            set_restarting(loop, not self._all_known())

    def _all_known(self) -> bool:
        monitored = {
            config.monitor
            for config in self._trainer.lr_scheduler_configs
            if config.reduce_on_plateau and config.interval == "epoch"
        }
        # Collected only where Lightning is about to do that, too: it may be a meeting of all.
        return not monitored or monitored <= self._trainer.callback_metrics.keys()


def _was_ending(trainer: Any) -> bool:
    """Whether nothing was left to do of an epoch but what Lightning does after its callbacks."""
    counted = is_in_end_hook(vars(trainer.fit_loop.epoch_progress.current))
    return counted and is_at_last_batch(trainer)
