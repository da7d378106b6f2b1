"""A worker's position in an epoch: its state and Lightning's number of the epoch.

Loaders, checkpoints and the redistribution of lost samples send events and read the state
(:mod:`hybridtrain.lightning.checkpointing.epoch_state`).
"""

from __future__ import annotations

from typing import Any

from hybridtrain.lightning.checkpointing.epoch_state import TABLE, EpochEvent, EpochState
from hybridtrain.lightning.checkpointing.mid_epoch import ResumedEpoch
from hybridtrain.lightning.hooks.loop_hooks import remeasure


class EpochPosition:
    """Applies the table of states in one worker.

    Args:
        trainer: of this worker.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.state = EpochState.BETWEEN
        self.resumed: ResumedEpoch | None = None  # from a checkpoint, until its epoch is over
        self._begun: int | None = None  # the last epoch that has begun
        self._has_other_lengths = False

    @property
    def epoch(self) -> int:
        """Lightning's number of the current epoch, or between epochs of the next."""
        return self._trainer.fit_loop.epoch_progress.current.processed

    @property
    def is_closing(self) -> bool:
        """Whether Lightning has counted the epoch, but not all workers have reached its end."""
        begun = self.state is not EpochState.BETWEEN and self._begun is not None
        return begun and self._begun != self.epoch

    @property
    def has_begun(self) -> bool:
        """Whether an epoch has begun in this run."""
        return self._begun is not None

    def on(self, event: EpochEvent) -> bool:
        """Apply an event; return whether it has changed the state."""
        before, self.state = self.state, TABLE.get((self.state, event), self.state)
        return self.state is not before

    def resume(self, resumed: ResumedEpoch | None) -> None:
        """Take over from a checkpoint; ``None``: it was not written within an epoch."""
        self.resumed = resumed
        if resumed is not None:
            self.on(resumed.event)

    def change_lengths(self) -> None:
        """Let Lightning measure the loaders anew in the next epoch."""
        self._has_other_lengths = True

    def begin(self) -> bool:
        """Lightning begins or resumes an epoch; return whether its loaders have changed."""
        changed, self._has_other_lengths = self._has_other_lengths, False
        self._begun = self.epoch
        if self.resumed is None or self.resumed.epoch != self._begun:
            self.on(EpochEvent.BEGINS)
            changed |= self.resumed is not None
            self.resumed = None
        if changed:
            remeasure(self._trainer)
        return changed
