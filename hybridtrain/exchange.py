"""What a worker hands over: its gradients, copied to its row of shared memory.

On a CPU the parameters are views of shared memory, so nothing comes back by copy; gradients are
copied as soon as autograd has accumulated them, while they are in the cache, or all at once before
the push where somebody may still change them. On a GPU rows and parameters cross the bus: see
:mod:`hybridtrain.exchange_cuda`.

Legend: P elements of one dtype's buffer, W workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from hybridtrain.memory import Store


class Exchange(Protocol):
    """The worker's side of one optimizer step."""

    def collect(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Bring these parameters' gradients to the row; returns the numbers that have none."""
        ...

    def refresh(self) -> None:
        """The masters have moved: bring the module's parameters up to date."""
        ...


class HostExchange:
    """Parameters that live in shared memory.

    Args:
        parameters: the module's, in the order of the layout's slots.
        store: the shared buffers.
        worker: whose row.
        eager: copy each gradient the moment autograd has accumulated it. Only where nobody reads
            or changes ``.grad`` between backward and step.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], store: Store, worker: int, eager: bool
    ) -> None:
        self._parameters = list(parameters)
        slots = store.layout.slots
        self._rows = [store.gradient(worker, slot) for slot in slots]  # each in parameter's shape
        for parameter, slot in zip(self._parameters, slots, strict=True):
            parameter.data = store.parameter(worker, slot)
        self._copied: set[int] = set()
        for number, parameter in enumerate(self._parameters):
            if eager and parameter.requires_grad:
                self._watch(number)

    def _watch(self, number: int) -> None:
        row, copied = self._rows[number], self._copied

        def copy(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            if not parameter.grad.is_sparse:
                row.copy_(parameter.grad)
                copied.add(number)

        self._parameters[number].register_post_accumulate_grad_hook(copy)

    def collect(self, numbers: Sequence[int]) -> tuple[int, ...]:
        absent, rows, gradients = [], [], []
        for number in numbers:
            gradient = self._parameters[number].grad
            if gradient is None:
                absent.append(number)
            elif number not in self._copied:
                rows.append(self._rows[number])
                gradients.append(gradient.to_dense() if gradient.is_sparse else gradient)
        if rows:
            torch._foreach_copy_(rows, gradients)
        self._copied.clear()
        return tuple(absent)

    def refresh(self) -> None:
        """Nothing: the parameters are views of what has moved."""
