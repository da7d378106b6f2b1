"""What a worker does so that others may be lost: the parts that the user's choice needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybridtrain.lightning.coming_back import ComingBack, Whereabouts
from hybridtrain.lightning.making_up import MakingUp
from hybridtrain.lightning.succession import Succession, know_the_loggers

if TYPE_CHECKING:
    from hybridtrain.lightning.loaders import Loaders
    from hybridtrain.lightning.strategy import HybridStrategy


class Losses:
    """Of one worker, whose training begins.

    Args:
        strategy: of this worker.
        trainer: its trainer.
        loaders: its loaders.
        back: if this worker is there again.
    """

    def __init__(
        self, strategy: HybridStrategy, trainer: Any, loaders: Loaders, back: ComingBack | None
    ) -> None:
        self._making_up: MakingUp | None = None
        choice, client = strategy.on_failure.choice, strategy.client
        if choice == "stop":
            return
        if back is None:
            know_the_loggers(trainer, strategy.collectives)
        Succession(trainer, client)
        lockstep = strategy.regime.lockstep
        if choice == "continue":
            loaders.remembers = lockstep
        else:
            client.tells = Whereabouts(trainer, loaders, strategy.generator_pages, back).tell
        if choice == "continue" or not lockstep:  # in lock-step a place is kept
            self._making_up = MakingUp(trainer, client, lambda: loaders.samplers, strategy.align)

    @property
    def epoch_is_over(self) -> bool:
        """Whether all have met at its end, and nobody has made a step since."""
        return self._making_up is not None and self._making_up.over

    def begin_batch(self) -> None:
        """A mini-batch begins."""
        if self._making_up is not None:
            self._making_up.over = False

    def meet(self) -> None:
        """All workers are here."""
        if self._making_up is not None:
            self._making_up.meet()
