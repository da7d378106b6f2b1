"""The parts of a worker that ``strategy.on_failure`` needs."""

from __future__ import annotations

from typing import Any

from hybridtrain.lightning.data.loaders import Loaders
from hybridtrain.lightning.failover.leader_failover import LeaderFailover, know_the_loggers
from hybridtrain.lightning.failover.lost_samples import LostSampleRedistribution
from hybridtrain.lightning.failover.rejoin import Rejoin, RejoinState
from hybridtrain.lightning.run_context import WorkerContext


class FailureHandling:
    """Prepares one worker, at the start of training, for the loss of others.

    Args:
        strategy: of this worker.
        trainer: of this worker.
        loaders: of this worker.
        back: if this worker has been restarted.
    """

    def __init__(
        self, strategy: WorkerContext, trainer: Any, loaders: Loaders, back: Rejoin | None
    ) -> None:
        self._making_up: LostSampleRedistribution | None = None
        self._strategy, self._whole_rounds = strategy, strategy.requirements.whole_rounds
        choice, client = strategy.on_failure.choice, strategy.client
        if choice == "stop":
            return
        if back is None:
            know_the_loggers(trainer, strategy.collectives)
        LeaderFailover(trainer, client)
        goes_on = choice == "continue"
        loaders.remembers = goes_on and self._whole_rounds
        state = RejoinState(trainer, loaders, strategy.rng_mailbox, back, asked=not goes_on)
        if goes_on or not self._whole_rounds:  # in lock-step a place is kept
            self._making_up = LostSampleRedistribution(
                trainer,
                client,
                lambda: loaders.samplers,
                loaders.position,
                self._meet_early,
                state.keep,
            )

    def _meet_early(self) -> None:
        """All workers meet, before the hooks of this mini-batch, which not every worker has."""
        self._strategy.meet()
        self._strategy.collectives.local = not self._whole_rounds

    def end_epoch(self) -> None:
        """Before all workers meet: a worker that stopped early has not met them at its end yet."""
        if self._making_up is not None and not self._whole_rounds:
            self._making_up.end()

    def meet(self) -> None:
        """All workers meet."""
        if self._making_up is not None:
            self._making_up.meet()
