"""Each parameter's place in a flat buffer.

Parameters of one dtype share a buffer, in the order of the optimizers and their parameter groups:
a group is contiguous, and its update one pass over memory. Each parameter begins on a cache line;
the padding holds zeros, which every elementwise optimizer leaves at zero.

Legend: P elements of a buffer, padding included.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import torch
from torch.nn.parameter import is_lazy

from hybridtrain.engine.memory.arena import ALIGNMENT_BYTES, dense_stride

FAR_BYTES = 1 << 22  # of rows that travel between hosts, for which it pays to prepare meanwhile


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place: ``numel`` elements from ``offset`` on, in the buffer of its dtype."""

    name: str
    dtype: torch.dtype
    offset: int
    numel: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """View a 1-D tensor of just this parameter's elements in the parameter's shape."""
        return flat.as_strided(self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class Layout:
    """All slots, in the order in which parameters are numbered, and the buffers' sizes.

    ``transport``: dtype in which gradients of float32 parameters are sent, rounded to nearest
    even; masters and optimizer state keep theirs. ``gradients``: whether workers send any, which
    reserves memory for their rows; ``sparse``: numbers of slots with sparse gradients, whose memory
    is allocated on the first write.
    """

    slots: tuple[Slot, ...]
    sizes: dict[torch.dtype, int] = field(default_factory=dict)  # dtype -> P
    state_bytes: int = 0  # room for other state that worker 0 shares, twice
    transport: torch.dtype | None = None
    gradients: bool = True
    sparse: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls,
        named: Iterable[tuple[str, torch.Tensor]],
        state_bytes: int = 0,
        transport: torch.dtype | None = None,
        gradients: bool = True,
        sparse: Iterable[int] = (),
    ) -> Layout:
        """Place the tensors one after the other, each dtype in its own buffer."""
        sizes: dict[torch.dtype, int] = {}
        slots = []
        for name, tensor in named:
            offset = sizes.get(tensor.dtype, 0)
            shape, stride = tuple(tensor.shape), dense_stride(tensor)
            slots.append(Slot(name, tensor.dtype, offset, tensor.numel(), shape, stride))
            step = ALIGNMENT_BYTES // tensor.element_size()
            sizes[tensor.dtype] = offset + -(-tensor.numel() // step) * step
        return cls(tuple(slots), sizes, state_bytes, transport, gradients, frozenset(sparse))

    def travels_as(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of parameters of ``dtype`` are sent."""
        return self.transport or dtype if dtype == torch.float32 else dtype

    @property
    def addable(self) -> list[torch.dtype]:
        """The dtypes that torch can add; parameters of the others (int8, float8) are frozen."""
        return [dtype for dtype in self.sizes if is_addable(dtype)]

    def stretches(self, numbers: Collection[int]) -> Iterator[tuple[torch.dtype, slice]]:
        """The parts of the buffers that hold these parameters, adjacent ones joined."""
        for dtype in self.sizes:
            slots = [each for each in enumerate(self.slots) if each[1].dtype == dtype]
            for wanted, group in groupby(slots, key=lambda each: each[0] in numbers):
                if wanted:
                    found = [slot for _, slot in group]
                    yield dtype, slice(found[0].offset, found[-1].offset + found[-1].numel)


def is_addable(dtype: torch.dtype) -> bool:
    """Whether gradients can have this dtype and be added up."""
    return (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1


def as_parameter(values: torch.Tensor) -> torch.nn.Parameter:
    """A parameter of these values, which needs gradients if it can have some."""
    return torch.nn.Parameter(values, is_addable(values.dtype))


def has_sums(dtype: torch.dtype) -> bool:
    """Whether torch adds such values: whole numbers, too, but no truth values and no float8."""
    return is_addable(dtype) or not (dtype.is_floating_point or dtype == torch.bool)


# ---- different parameters that share memory -----------------------------------------------------
# Two names of one ``Parameter`` are tied and stay tied. Two ``Parameter`` objects over the same
# bytes would get separate places in the shared buffers, and silently become independent.


class _FlatSpan(NamedTuple):
    """The addresses from a tensor's first to its last byte."""

    device: str
    begin: int
    end: int
    name: str
    tensor: torch.Tensor

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> _FlatSpan:
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
    spans = [_FlatSpan.of(name, t) for name, t in reversed(first_names.values())]
    active: list[_FlatSpan] = []
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


def _share_an_element(one: _FlatSpan, other: _FlatSpan) -> bool:
    if one.tensor.is_contiguous() and other.tensor.is_contiguous():
        return True
    return bool(torch.isin(one.addresses(), other.addresses()).any())
