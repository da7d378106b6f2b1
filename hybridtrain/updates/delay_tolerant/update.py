"""The update of an optimizer that is told how late each gradient is."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybridtrain.memory import Store
from hybridtrain.protocol.messages import Clip
from hybridtrain.updates.contribution import Contribution
from hybridtrain.updates.delay_tolerant.optimizers import DelayTolerant
from hybridtrain.updates.evaluation import Again, Evaluation
from hybridtrain.updates.groups import slowed
from hybridtrain.updates.per_tensor import PerTensorUpdate, clip_gradients


class DelayTolerantUpdate(PerTensorUpdate):
    """Steps once for each contribution, one behind the other.

    Several in one update are stepped with their shares, so that together they count as their mean.

    Args:
        optimizer: over views of the masters, in host memory.
        numbers: the slot number of each of its parameters, group by group.
        store: the shared rows.
    """

    wants_staleness = True

    def __init__(self, optimizer: DelayTolerant, numbers: Sequence[int], store: Store) -> None:
        super().__init__(optimizer, numbers, store)
        self._told, self._held = optimizer, store.held

    def read(self, worker: int) -> None:
        with torch.no_grad():
            self._told.read(worker)

    def step(
        self,
        contributions: Sequence[Contribution],
        clip: Clip | None,
        evaluation: Evaluation | None = None,
        rate: float = 1.0,
    ) -> Again | None:
        for each in contributions:
            for index, parameter in enumerate(self._parameters):
                parameter.grad = self._mean(index, [each])
            clip_gradients([p.grad for p in self._parameters if p.grad is not None], clip)
            with slowed(self._optimizer.param_groups, rate):
                worker = None if each.worker == self._held else each.worker
                self._told.step_late(worker, each.staleness)
        return None
