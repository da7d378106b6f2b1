"""Where each parameter lies in a flat buffer.

Parameters of one dtype share a buffer. Within it they follow one another in the order of the
optimizers and their parameter groups, so that a group is a contiguous stretch and its update one
pass over memory. Each begins on a cache line; the few elements in between hold zeros, which every
elementwise optimizer leaves at zero.

Legend: P elements of a buffer, padding included.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from hybridtrain.memory.arena import ALIGNMENT_BYTES


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
        """The parameter's elements of a 1-D stretch that holds just them, in its own shape."""
        return flat.as_strided(self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class Layout:
    """All slots, in the order in which parameters are numbered, and the buffers' sizes.

    ``transport``: what gradients of float32 parameters travel as, rounded to nearest even; masters
    and the optimizer's state stay what they are. ``gradients``: whether there will be any, in rows
    that memory is asked for; ``sparse``: the numbers of slots whose gradients are a few rows each,
    so that memory is taken as they come.
    """

    slots: tuple[Slot, ...]
    sizes: dict[torch.dtype, int] = field(default_factory=dict)  # dtype -> P
    state_bytes: int = 0  # room for what else worker 0 shows to the others, twice
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
        """Lay the tensors out one behind the other, each dtype in its own buffer."""
        sizes: dict[torch.dtype, int] = {}
        slots = []
        for name, tensor in named:
            offset = sizes.get(tensor.dtype, 0)
            shape, stride = tuple(tensor.shape), _dense_stride(tensor)
            slots.append(Slot(name, tensor.dtype, offset, tensor.numel(), shape, stride))
            step = ALIGNMENT_BYTES // tensor.element_size()
            sizes[tensor.dtype] = offset + -(-tensor.numel() // step) * step
        return cls(tuple(slots), sizes, state_bytes, transport, gradients, frozenset(sparse))

    def travels_as(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the rows that hold gradients of parameters of this one."""
        return self.transport or dtype if dtype == torch.float32 else dtype


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its own stride where that leaves no gaps (``channels_last``), else the contiguous one."""
    dense = torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format)
    return tuple(dense.stride())
