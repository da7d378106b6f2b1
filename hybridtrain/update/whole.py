"""The user's own optimizer object, stepping the master parameters one whole parameter at a time.

The general case: whatever works in one process works here, with the arithmetic the user chose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hybridtrain.memory import Store
from hybridtrain.messages import Clip
from hybridtrain.update.contribution import Contribution
from hybridtrain.update.merge import merge
from hybridtrain.update.update import clip_factor


class WholeParameters:
    """Steps an optimizer whose parameters are views of the masters.

    Args:
        optimizer: over views of the masters, in host memory.
        numbers: the slot number of each of its parameters, group by group.
        store: the shared rows.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, numbers: Sequence[int], store: Store
    ) -> None:
        self.name = type(optimizer).__name__
        self._optimizer = optimizer
        self._numbers = tuple(numbers)
        self._store = store
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        slots = [store.layout.slots[number] for number in self._numbers]
        self._rows = [
            [store.gradient(worker, slot) for slot in slots] for worker in range(store.n_workers)
        ]  # W × parameters, each in the parameter's shape
        self._means = [torch.zeros_like(p) for p in self._parameters]

    @property
    def n_groups(self) -> int:
        return len(self._optimizer.param_groups)

    def step(self, contributions: Sequence[Contribution], clip: Clip | None) -> None:
        for index, parameter in enumerate(self._parameters):
            parameter.grad = self._mean(index, contributions)
        self._clip(clip)
        self._optimizer.step()

    def _mean(self, index: int, contributions: Sequence[Contribution]) -> torch.Tensor | None:
        number = self._numbers[index]
        parts = [c for c in contributions if number not in c.absent]
        if not parts:
            return None
        rows = [self._rows[c.worker][index] for c in parts]
        return merge(rows, [c.share for c in parts], self._means[index])

    def _clip(self, clip: Clip | None) -> None:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if clip is None or not gradients:
            return
        if clip.algorithm == "value":
            torch._foreach_clamp_min_(gradients, -clip.limit)
            torch._foreach_clamp_max_(gradients, clip.limit)
            return
        factor = clip_factor(torch.nn.utils.get_total_norm(gradients), clip.limit)
        torch._foreach_mul_(gradients, factor)

    def set_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        for own, new in zip(self._optimizer.param_groups, groups, strict=True):
            own.update(new)

    def state(self) -> dict[int, dict[str, Any]]:
        return dict(self._optimizer.state_dict()["state"])
