"""A worker's own steps between two exchanges: what an exchange sees of one optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Protocol

import torch

from hybridtrain.engine.exchanges import Leaving, LocalExchange, evaluates
from hybridtrain.engine.memory.layout import is_addable
from hybridtrain.engine.updates.groups import needs_closure, puts_off
from hybridtrain.engine.updates.kernels.choice import own_step
from hybridtrain.errors import UserError
from hybridtrain.util.option_types import as_typed


class Parameters(Protocol):
    """A worker's own parameters beside the masters, by slot number."""

    def parameters(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        """The worker's own."""

    def masters(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        """As this worker has read them last."""

    def moved(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        """The masters less the worker's own."""


class LocalSteps:
    """One optimizer's steps on this worker's own parameters; its state is the worker's own, too.

    Args:
        optimizer: the user's.
        numbers: the slot number of each of its parameters, group by group.
        source: the worker's parameters, and the masters as it has read them last.
        exchange: decides when something leaves; a copy of its own is made.
        fresh: nobody moves the masters while this worker computes.
        worker: its number.
        workers: how many train.

    Raises:
        UserError: if the optimizer evaluates its closure several times in a step, or has a
            parameter that cannot be trained.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        numbers: tuple[int, ...],
        source: Parameters,
        exchange: LocalExchange,
        fresh: bool,
        worker: int,
        workers: int,
    ) -> None:
        _check(optimizer, source.masters(numbers), exchange)
        self._optimizer, self._numbers, self._source = optimizer, numbers, source
        self.exchange = deepcopy(exchange)
        self._trained = [p for group in optimizer.param_groups for p in group["params"]]
        self.parameters = source.parameters(numbers)
        self._masters = source.masters(numbers)
        self.samples, self.loss, self.ends = 0.0, 0.0, False
        self.fresh, self.worker, self.workers = fresh, worker, workers

    @property
    def masters(self) -> Sequence[torch.Tensor]:
        """As this worker has read them last, where its parameters are."""
        return _BroughtSteps(self._masters, self.parameters)

    @property
    def rate(self) -> float:
        return max(float(group["lr"]) for group in self._optimizer.param_groups)

    @property
    def gradients(self) -> list[torch.Tensor | None]:
        return [parameter.grad for parameter in self._trained]

    def step(self) -> None:
        own_step(self._optimizer)

    def moved(self, places: Sequence[int] | None = None) -> list[torch.Tensor]:
        numbers = self._numbers
        return self._source.moved(numbers if places is None else [numbers[p] for p in places])

    def advance(self, samples: float, loss: float | None = None) -> Leaving:
        """One step with the gradients of so many samples; with none, the others make it."""
        self.samples, self.loss = samples, 0.0 if loss is None else loss
        with torch.no_grad():
            if samples > 0:
                return self.exchange.step(self)
            return self.exchange.skip(self)

    def flush(self, ends: bool) -> Leaving:
        """Hand over the steps since the last exchange; ``ends``: the epoch or training ends."""
        self.ends = ends
        if self.has_unsent and puts_off(self._optimizer):
            behind: Any = self._optimizer
            behind.catch_up()
        with torch.no_grad():
            return self.exchange.flush(self)

    @property
    def has_unsent(self) -> bool:
        """Whether steps have been made that nothing has been handed over of."""
        return self.exchange.has_unsent

    def take(self) -> Leaving:
        """The release has brought the newest masters; perhaps something follows."""
        with torch.no_grad():
            return self.exchange.take(self, self.masters)


def _check(
    optimizer: torch.optim.Optimizer, masters: Sequence[torch.Tensor], exchange: LocalExchange
) -> None:
    if needs_closure(optimizer) and not evaluates(exchange):
        raise UserError(
            f"{type(optimizer).__name__} was given with exchange={as_typed(exchange)}, but it "
            "evaluates its closure several times in a step, and a worker's own step has one "
            "gradient; use SGD or Adam, or exchange=gradient with policy=hybrid"
        )
    for master in masters:
        if not is_addable(master.dtype):
            raise UserError(
                f"{type(optimizer).__name__} was given a parameter of {master.dtype} with "
                f"exchange={as_typed(exchange)}, which adds up how far parameters move; "
                "leave it out of the optimizer: [p for p in self.parameters() if "
                "p.requires_grad]"
            )


class _BroughtSteps(Sequence[torch.Tensor]):
    """Host tensors; indexing copies one to the device of its counterpart, if that is another."""

    def __init__(self, tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
        self._tensors, self._others = tensors, others

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, place: Any) -> Any:
        return self._tensors[place].to(self._others[place].device)
