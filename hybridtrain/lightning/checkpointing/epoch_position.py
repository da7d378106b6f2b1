"""Where in an epoch one worker is, for all that go by it.

Loaders, checkpoints and the making up for lost samples tell it what happens and ask it for the
state (:mod:`hybridtrain.lightning.data.epoch_state`) and for the epoch as Lightning counts it.
"""

from __future__ import annotations

from typing import Any

from hybridtrain.lightning.checkpointing.mid_epoch import Resumed
from hybridtrain.lightning.data.epoch_state import TABLE, EpochEvent, EpochState
from hybridtrain.lightning.hooks.loop_hooks import remeasure


class EpochPosition:
    """Of one worker.

    Args:
        trainer: of this worker.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.state = EpochState.BETWEEN
        self.resumed: Resumed | None = None  # what a checkpoint says, until its epoch is over
        self._begun: int | None = None  # the epoch that has begun last
        self._has_other_lengths = False

    @property
    def epoch(self) -> int:
        """The number of the epoch that is under way, or that comes next, as Lightning counts."""
        return self._trainer.fit_loop.epoch_progress.current.processed

    @property
    def is_closing(self) -> bool:
        """Whether Lightning has counted the epoch, but not all workers have come to its end."""
        begun = self.state is not EpochState.BETWEEN and self._begun is not None
        return begun and self._begun != self.epoch

    def on(self, event: EpochEvent) -> bool:
        """Something has happened; whether it has changed the state."""
        before, self.state = self.state, TABLE.get((self.state, event), self.state)
        return self.state is not before

    def resume(self, resumed: Resumed | None) -> None:
        """A checkpoint has been read; ``None``: it is not of the middle of an epoch."""
        self.resumed = resumed
        if resumed is not None:
            self.on(resumed.event)

    def change_lengths(self) -> None:
        """The loaders have other lengths in the next epoch than Lightning knows."""
        self._has_other_lengths = True

    def begin(self) -> bool:
        """Lightning begins with an epoch, or goes on with one; whether its loaders have changed."""
        changed, self._has_other_lengths = self._has_other_lengths, False
        self._begun = self.epoch
        if self.resumed is None or self.resumed.epoch != self._begun:
            self.on(EpochEvent.BEGINS)
            changed |= self.resumed is not None
            self.resumed = None
        if changed:
            remeasure(self._trainer)
        return changed
