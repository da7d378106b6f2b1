"""What a strategy's parts are put together from, as a worker needs it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridtrain.exchanges import Exchange, Requirements
from hybridtrain.updates.named import NamedUpdate


@dataclass(frozen=True)
class Scheme:
    """``exchange``: what workers hand over; ``update``: how the masters move, if the user has said;
    ``requirements``: what everybody may rely on.
    """

    requirements: Requirements
    exchange: Exchange
    update: NamedUpdate | None = None

    @property
    def _update(self) -> NamedUpdate:
        return self.update or NamedUpdate(self.exchange.update)

    @property
    def _inherits(self) -> bool:
        """Whether the masters' optimizer follows the module's own, as that steps nothing itself."""
        return self.requirements.parameters != "own"

    def over(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """What steps the masters of the parameters of one of the module's optimizers."""
        return self._update.over(optimizer, self._inherits)

    def follows(self, optimizer: torch.optim.Optimizer) -> frozenset[str] | None:
        """The hyper-parameters that the server is told of when they change; ``None``: all."""
        if self._update.is_users:
            return None
        return self._update.follows(optimizer) if self._inherits else frozenset()
