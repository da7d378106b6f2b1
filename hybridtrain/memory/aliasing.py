"""Different parameters that share memory.

Two names of one ``Parameter`` are tied and stay tied. Two ``Parameter`` objects over the same bytes
would get separate places in the shared buffers, and silently become independent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.nn.parameter import is_lazy


@dataclass(frozen=True, slots=True)
class _Span:
    """The addresses from a tensor's first to its last byte."""

    device: str
    begin: int
    end: int
    name: str
    tensor: torch.Tensor

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> _Span:
        extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        begin = tensor.data_ptr()
        end = begin + extent * tensor.element_size()
        return cls(str(tensor.device), begin, end, name, tensor)

    def addresses(self) -> torch.Tensor:
        """The address of every byte of an element: 1-D int64."""
        size = self.tensor.element_size()
        steps = torch.arange((self.end - self.begin) // size)
        elements = steps.as_strided(self.tensor.shape, self.tensor.stride()).reshape(-1, 1)
        return (self.begin + elements * size + torch.arange(size)).flatten()


def overlapping(named: Iterable[tuple[str, torch.Tensor]]) -> tuple[str, str] | None:
    """The names of two tensors that share elements (one name twice: within itself), or ``None``.

    Views of one storage that share no element do not overlap. Tensors without strided memory
    (``meta``, lazy, empty, sparse) are skipped.
    """
    first_names = {id(t): (name, t) for name, t in reversed(list(named)) if _has_memory(t)}
    spans = [_Span.of(name, t) for name, t in reversed(first_names.values())]
    active: list[_Span] = []
    for span in sorted(spans, key=lambda s: (s.device, s.begin)):
        if _is_expanded(span.tensor):
            return span.name, span.name
        active = [s for s in active if s.device == span.device and s.end > span.begin]
        for other in active:
            if _share_an_element(other, span):
                return other.name, span.name
        active.append(span)
    return None


def _has_memory(tensor: torch.Tensor) -> bool:
    if is_lazy(tensor) or tensor.is_meta or tensor.layout != torch.strided:
        return False
    return tensor.numel() > 0 and type(tensor) in (torch.Tensor, torch.nn.Parameter)


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(s == 0 and n > 1 for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _share_an_element(one: _Span, other: _Span) -> bool:
    if one.tensor.is_contiguous() and other.tensor.is_contiguous():
        return True
    return bool(torch.isin(one.addresses(), other.addresses()).any())
