"""The contract of a correction, and what it is told of a late gradient.

Theory of operation. A gradient is *stale* by tau if tau updates were made between the reading of
the parameters it was computed at and its application. Where workers run freely the server still has
what the worker had read, beside the parameters as they are now, so it can do something about it
just before the gradient is merged. There are two families. One shortens the step: the gradient
counts with a factor, and the learning rate of this one step is multiplied by the factors' mean, so
that the step is really shorter (an optimizer like Adam does not care how long its gradient is). The
other changes the gradient itself, in the worker's row, which nobody reads after that. A correction
composes with any policy and any optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hybridtrain.errors import UserError
from hybridtrain.memory import Store
from hybridtrain.updates.contribution import Contribution
from hybridtrain.updates.staleness.parts import Part, parts_of
from hybridtrain.util.option_types import Checked

_LOW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Late:
    """One contribution, about to be merged, ``staleness`` updates late, low precision as float32.

    ``numbers`` are those of the optimizer's parameters.
    """

    contribution: Contribution
    staleness: int
    numbers: Sequence[int]
    store: Store

    @property
    def worker(self) -> int:
        """Whose."""
        return self.contribution.worker

    def parts(self) -> list[Part]:
        """What the gradient is about, in portions that fit the cache."""
        absent, packed = self.contribution.absent, self.contribution.packed
        return parts_of(self.store.layout, self.numbers, absent, packed)

    def gradient(self, part: Part) -> torch.Tensor:
        """That of a part. To be changed in place and given to :meth:`replace`."""
        return high(part.gradient(self.store.gradients[self.worker]))

    def replace(self, part: Part, gradient: torch.Tensor) -> None:
        """From now on this is the part's gradient."""
        place = part.gradient(self.store.gradients[self.worker])
        if place.data_ptr() != gradient.data_ptr():
            place.copy_(gradient)

    def gap(self, part: Part) -> torch.Tensor:
        """How far the parameters have moved since the worker has read them: a new tensor."""
        now, read = part.read(self.store.masters), part.read(self.store.copies[self.worker])
        return high(now) - high(read)


class Correction(Checked):
    """Does nothing about late gradients; others override what they need."""

    prefix = "correction."

    def begin(self, store: Store) -> None:
        """Training begins with the parameters in this store; forget what was before.

        Raises:
            UserError: if it cannot be corrected.
        """

    def factor(self, staleness: int) -> float:
        """What the step counts for, in [0, 1]."""
        return 1.0

    def correct(self, late: Late) -> None:
        """Change the gradient in its row."""

    @contextmanager
    def watch(self, merged: Sequence[Late]) -> Iterator[None]:
        """Around the step that is made of these contributions."""
        yield


def high(tensor: torch.Tensor) -> torch.Tensor:
    """In a precision to compute with; itself, where it has one."""
    return tensor.float() if tensor.dtype in _LOW else tensor


def zeros_like(buffers: dict[torch.dtype, torch.Tensor]) -> dict[torch.dtype, torch.Tensor]:
    """One figure to remember for each element."""
    return {dtype: torch.zeros_like(high(flat)) for dtype, flat in buffers.items()}


def check_real(store: Store, name: str) -> None:
    """Corrections of the gradient are of each element by itself.

    Raises:
        UserError: if there are complex ones.
    """
    for slot in store.layout.slots:
        if slot.dtype.is_complex:
            raise UserError(
                f"correction={name} was given, but the parameter {slot.name} is of "
                f"{slot.dtype}, and it is defined for real ones; use correction=by_staleness or "
                "polynomial"
            )
