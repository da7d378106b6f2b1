"""Any elementwise optimizer through its public class: where torch's private engines are missing."""

from __future__ import annotations

from typing import Any

import torch

from hybridtrain.updates.kernels.kernel import Figures, Group, Kernel, StepChunk, Tensors
from hybridtrain.updates.optimizer_traits import look_for_no_device


class PublicClass(Kernel):
    """Steps a chunk as if it were the only parameter of an optimizer of the class.

    Args:
        like: the kernel that it stands in for.
        kind: the optimizer's class.
        fused: with its fused engine.
    """

    def __init__(self, like: Kernel, kind: type[torch.optim.Optimizer], fused: bool) -> None:
        self._like, self._kind = like, kind
        self.figures, self.chunk = like.figures, like.chunk
        self._engine = {"fused": fused and self._has_engine(), "foreach": False}

    def _has_engine(self) -> bool:
        alone = torch.nn.Parameter(torch.zeros(1))
        alone.grad = torch.zeros(1)
        try:
            optimizer = self._kind([alone], fused=True)  # type: ignore[call-arg]
            look_for_no_device(optimizer)
            optimizer.step()
        except (AttributeError, RuntimeError, TypeError):
            return False
        return True

    def names(self, group: Group) -> tuple[str, ...]:
        return self._like.names(group)

    def start(self, group: Group) -> dict[str, float]:
        return self._like.start(group)

    def keeps(self, group: Group) -> bool:
        return self._like.keeps(group)

    def prepare(self, group: Group, figures: Figures, first: bool) -> StepChunk:
        before = {name: figure.clone() for name, figure in figures.items()}
        names = self.names(group)
        nothing = [torch.zeros(1) for _ in range(2 + len(names))]
        self._step(group, nothing, figures, names, first)  # counts

        def step(p: torch.Tensor, g: torch.Tensor, state: Tensors, scratch: Tensors) -> None:
            own = {name: figure.clone() for name, figure in before.items()}
            self._step(group, [p, g, *state], own, names, first)

        return step

    def _step(
        self, group: Group, tensors: Tensors, figures: Figures, names: tuple[str, ...], first: bool
    ) -> None:
        parameter = torch.nn.Parameter(tensors[0])
        parameter.grad = tensors[1]
        optimizer = self._kind([parameter])  # type: ignore[call-arg]
        look_for_no_device(optimizer)
        optimizer.param_groups[0].update(group | self._engine)
        kept: dict[str, Any] = dict(zip(names, tensors[2:], strict=True))
        optimizer.state[parameter] = (
            {} if first and not figures else dict(figures) | kept  # SGD has nothing to begin with
        )
        optimizer.step()
        for name, flat in kept.items():
            made = optimizer.state[parameter][name]
            if made.data_ptr() != flat.data_ptr():
                flat.copy_(made)
