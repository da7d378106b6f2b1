"""The mini-batches of the current epoch with which this worker has made steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridtrain.engine.samplers import EpochSampler
from hybridtrain.engine.worker.steps import Steps
from hybridtrain.lightning.checkpointing.epoch_position import EpochPosition
from hybridtrain.lightning.checkpointing.rng_state import RngState
from hybridtrain.lightning.checkpointing.saved_schedules import SavedSchedules
from hybridtrain.lightning.hooks.loop_hooks import logged_step


class CommittedBatches:
    """Commits mini-batches with each step, and takes them back if the step is aborted.

    Args:
        trainer: of this worker.
        samplers: of the training loaders, at any time.
        position: of this worker in the epoch.
        steps: of this worker; know the version, and whether a push was dropped.
        rng_state: of this worker.
    """

    def __init__(
        self,
        trainer: Any,
        samplers: Sequence[EpochSampler],
        position: EpochPosition,
        steps: Steps,
        rng_state: RngState,
    ) -> None:
        self._trainer, self._samplers, self._position = trainer, samplers, position
        self._steps, self._rng_state = steps, rng_state
        self._remembers = False
        self._committed: tuple[int, int] | None = None  # epoch, mini-batches of it done
        self._former: tuple[int, int] | None = None  # the same before steps that may be repeated
        # The masters lack steps: one worker's own checkpoint repeats them.
        self.has_unsent = False
        self.n_unsent = 0  # so many
        # Logged step and schedules before them.
        self.before_unsent: tuple[int, SavedSchedules] | None = None

    def remember(self, remembers: bool) -> None:
        """Whether samplers remember each step's mini-batches."""
        self._remembers = remembers

    def commit(self, has_unsent: bool = False, made: bool = True) -> None:
        """A step has been made with the mini-batches since the last one.

        ``has_unsent``: the masters lack it, and perhaps others before. ``made``: else all that had
        samples in it were lost, and this worker only counts its mini-batches.
        """
        self._rng_state.commit()
        if not self._steps.counted:  # it was dropped
            for sampler in self._samplers:
                sampler.drop()
            return
        version = self._steps.expected_version
        for sampler in self._samplers:
            sampler.commit(version if self._remembers and made else None, self.has_unsent)
        ready = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if not self.has_unsent:
            self._former, self.n_unsent, self.before_unsent = self._committed, 0, None
            if has_unsent:
                self.before_unsent = logged_step(self._trainer), SavedSchedules.of(self._trainer)
        place = self._position.epoch, ready
        self.n_unsent += has_unsent and place != self._committed  # without data it may come twice
        self._committed, self.has_unsent = place, has_unsent

    def settle(self) -> None:
        """The masters have all steps."""
        self.has_unsent = False

    @property
    def under_way(self) -> bool:
        """Whether a mini-batch has begun since the last step."""
        return self._rng_state.under_way

    def take_back(self) -> None:
        """The last step was aborted: its mini-batches, and those of steps that the masters lack,
        are left to do.
        """
        for sampler in self._samplers:
            sampler.take_back(self._steps.version)
        self._rng_state.take_back()
        self._committed, self.has_unsent = self._former, self.before_unsent is not None

    def done(self, epoch: int, sent: bool) -> int | None:
        """Mini-batches of this epoch that are done; ``None``: of another epoch, or none.

        ``sent``: of steps that the masters have.
        """
        committed = self._former if sent else self._committed
        return committed[1] if committed is not None and committed[0] == epoch else None
