"""The base of an exchange whose workers step parameters of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, ClassVar

import torch

from hybridtrain.engine.exchanges.compression import Compressor
from hybridtrain.engine.exchanges.exchange import (
    RESIDUALS,
    Leaving,
    Local,
    Parameters,
    StepFactory,
)


class StepsOwnParameters:
    """A :class:`~hybridtrain.engine.exchanges.LocalExchange` less ``step``, ``skip``, ``flush``,
    ``has_unsent``.

    ``remembers``: the attributes that a checkpoint keeps, without the ``_`` that they begin with.
    ``by_rate``: a learning rate that falls decides in which steps something is handed over.
    ``evaluates``: a worker never steps, but evaluates the loss where the update asks for it.
    ``compressor``: keeps what an encoding leaves out, if the exchange encodes what it hands over.
    """

    parameters: ClassVar[Parameters] = "own"
    keeps: ClassVar[bool] = False
    by_rate = False
    evaluates: ClassVar[bool] = False
    update: ClassVar[str] = "mean"
    remembers: ClassVar[tuple[str, ...]] = ()
    compressor = Compressor(None)

    @property
    def steps(self) -> int:
        """One: each step of a worker is handed over, as a rule."""
        return 1

    def worker_steps(self: Any, factory: StepFactory) -> Any:
        """On parameters of the worker's own."""
        return factory.step_own_parameters(self)

    def check(self, n_workers: int, whole_rounds: bool) -> None:
        """Any number of workers is right, and any policy that ``begin_policy`` admits."""

    def take(self, local: Local, newest: Sequence[torch.Tensor]) -> Leaving:
        """The worker goes on from the masters."""
        torch._foreach_copy_(local.parameters, list(newest))
        return None

    def state(self) -> dict[str, Any]:
        known = {name: copy(getattr(self, f"_{name}")) for name in self.remembers}
        return {**known, RESIDUALS: self.compressor.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for name in self.remembers:
            setattr(self, f"_{name}", copy(state.get(name, getattr(self, f"_{name}"))))
        self.compressor.load_state(state.get(RESIDUALS, {}))
