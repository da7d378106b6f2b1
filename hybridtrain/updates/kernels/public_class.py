"""Rarely used elementwise optimizers through their public class."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from hybridtrain.updates.kernels.kernel import (
    Figures,
    Group,
    Kept,
    Kernel,
    StepChunk,
    Tensors,
    number,
)
from hybridtrain.updates.optimizer_traits import look_for_no_device


class KeptState(Kept):
    """The state of an optimizer class that does not depend on hyper-parameters.

    Args:
        names: of the state tensors.
        figures: besides the number of steps.
        start: initial values other than zero; ``None``: the learning rate.
    """

    def __init__(
        self,
        *names: str,
        figures: tuple[str, ...] = (),
        start: Mapping[str, float | None] = MappingProxyType({}),
    ) -> None:
        self._names, self._start = names, start
        self.figures = ("step", *figures)

    def names(self, group: Group) -> tuple[str, ...]:
        return self._names

    def start(self, group: Group) -> dict[str, float]:
        rate = number(group["lr"])
        return {name: rate if value is None else value for name, value in self._start.items()}


class PublicClass(Kernel):
    """Steps a chunk as the only parameter of an optimizer of the class.

    Args:
        like: the state of the class.
        kind: the optimizer's class.
        fused: with its fused engine.
    """

    def __init__(self, like: Kept, kind: type[torch.optim.Optimizer], fused: bool = False) -> None:
        self._like, self._kind = like, kind
        self.figures = like.figures
        self._engine = {"fused": fused, "foreach": False}

    def names(self, group: Group) -> tuple[str, ...]:
        return self._like.names(group)

    def start(self, group: Group) -> dict[str, float]:
        return self._like.start(group)

    def prepare(self, group: Group, figures: Figures, first: bool) -> StepChunk:
        before = {name: figure.clone() for name, figure in figures.items()}
        names, group = self.names(group), group | self._engine  # copied: its rate may be temporary
        nothing = [torch.zeros(1) for _ in range(2 + len(names))]
        self._step(group, nothing, figures, names)  # counts

        def step(p: torch.Tensor, g: torch.Tensor, state: Tensors, scratch: Tensors) -> None:
            own = {name: figure.clone() for name, figure in before.items()}
            self._step(group, [p, g, *state], own, names)

        return step

    def _step(
        self, group: Group, tensors: Tensors, figures: Figures, names: tuple[str, ...]
    ) -> None:
        parameter = torch.nn.Parameter(tensors[0])
        parameter.grad = tensors[1]
        optimizer = self._kind([parameter])  # type: ignore[call-arg]
        look_for_no_device(optimizer)
        optimizer.param_groups[0].update(group)
        kept: dict[str, Any] = dict(zip(names, tensors[2:], strict=True))
        optimizer.state[parameter] = dict(figures) | kept
        optimizer.step()
        for name, flat in kept.items():
            made = optimizer.state[parameter][name]
            if made.data_ptr() != flat.data_ptr():
                flat.copy_(made)
