"""A worker's own steps between two exchanges: what an exchange sees of one optimizer."""

from __future__ import annotations

from copy import deepcopy

import torch

from hybridtrain.errors import UserError
from hybridtrain.exchanges import LocalExchange, Offer
from hybridtrain.lightning.step.in_place import step_of
from hybridtrain.lightning.step.trained_parameters import parameters_of
from hybridtrain.updates.optimizer_traits import needs_closure
from hybridtrain.worker.replica_own import OwnReplica


class LocalSteps:
    """Of one optimizer, whose state is this worker's own.

    Args:
        optimizer: the user's.
        numbers: the slot number of each of its parameters, group by group.
        replica: the worker's parameters.
        exchange: decides when something leaves; a copy of its own is made.

    Raises:
        UserError: if the optimizer evaluates its closure as it pleases.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        numbers: tuple[int, ...],
        replica: OwnReplica,
        exchange: LocalExchange,
    ) -> None:
        if needs_closure(optimizer):
            raise UserError(
                f"{type(optimizer).__name__} was given with exchange={exchange}, but it evaluates "
                "its closure several times in a step, and a worker's own step has one gradient; "
                "use SGD or Adam, or exchange=gradient with policy=hybrid"
            )
        self._optimizer, self._numbers, self._replica = optimizer, numbers, replica
        self._exchange = deepcopy(exchange)
        self._trained = parameters_of(optimizer)
        self.parameters = replica.parameters(numbers)
        self.masters = replica.masters(numbers)
        self.samples = 0.0

    @property
    def gradients(self) -> list[torch.Tensor | None]:
        return [parameter.grad for parameter in self._trained]

    def step(self) -> None:
        step_of(self._optimizer)(self._optimizer)

    def advance(self, samples: float) -> Offer | None:
        """One step with the gradients of so many samples; with none, the others make it."""
        self.samples = samples
        with torch.no_grad():
            if samples > 0:
                return self._exchange.step(self)
            return self._exchange.skip(self)

    def flush(self) -> Offer | None:
        """What has not been handed over yet."""
        with torch.no_grad():
            return self._exchange.flush(self)

    def hand_over(self, offer: Offer) -> tuple[int, ...]:
        """Into the worker's row; returns the slot numbers of what is not part of it."""
        return self._replica.hand_over(self._numbers, offer.values, offer.encoded)

    def take(self) -> None:
        """The release has brought the newest masters."""
        with torch.no_grad():
            self._exchange.take(self, self.masters)
