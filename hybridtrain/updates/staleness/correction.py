"""The contract of a correction, and the corrections that only shorten the step.

Theory of operation. A gradient is *stale* by tau if tau updates were made between the worker's read
of the parameters and the gradient's application. Under asynchronous policies the server has the
parameters that each worker read, beside the current ones, and can correct a gradient just before it
is merged. There are two families. One shortens the step: the gradient is weighted with a factor,
and the learning rate of this step is multiplied by the factors' mean (the shares sum to 1 again, as
an optimizer like Adam ignores the length of its gradient). The other changes the gradient in the
worker's row. A correction works with any policy and any optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hybridtrain.errors import UserError
from hybridtrain.memory import Store
from hybridtrain.updates.base import Contribution
from hybridtrain.updates.staleness.parts import Part, parts_of
from hybridtrain.util.option_types import Checked, NotNegative

_LOW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Late:
    """One contribution before it is merged; low precision is read as float32.

    ``staleness``: in updates; ``numbers``: slot numbers of the optimizer's parameters.
    """

    contribution: Contribution
    staleness: int
    numbers: Sequence[int]
    store: Store

    @property
    def worker(self) -> int:
        """The worker's number."""
        return self.contribution.worker

    def parts(self) -> list[Part]:
        """The elements of the gradient, in portions that fit the cache."""
        absent, packed = self.contribution.absent, self.contribution.packed
        return parts_of(self.store.layout, self.numbers, absent, packed)

    def gradient(self, part: Part) -> torch.Tensor:
        """The gradient of a part, to be changed in place and given to :meth:`replace`."""
        return high(part.gradient(self.store.gradients[self.worker]))

    def replace(self, part: Part, gradient: torch.Tensor) -> None:
        """Write the part's gradient to the worker's row."""
        place = part.gradient(self.store.gradients[self.worker])
        if place.data_ptr() != gradient.data_ptr():
            place.copy_(gradient)

    def gap(self, part: Part) -> torch.Tensor:
        """The movement of the parameters since the worker read them: a new tensor."""
        now, read = part.read(self.store.masters), part.read(self.store.copies[self.worker])
        return high(now) - high(read)


class Correction(Checked):
    """A correction that does nothing; subclasses override what they need."""

    prefix = "correction."

    def begin(self, store: Store) -> None:
        """Reset for training with this store.

        Raises:
            UserError: if its parameters cannot be corrected.
        """

    def factor(self, staleness: int) -> float:
        """The factor of the step, in [0, 1]."""
        return 1.0

    def correct(self, late: Late) -> None:
        """Change the gradient in its row."""

    @contextmanager
    def watch(self, merged: Sequence[Late]) -> Iterator[None]:
        """A context around the step with these contributions."""
        yield


@dataclass
class ByStaleness(Correction):
    """The learning rate divided by the staleness: alpha_0 / max(1, tau).

    Zhang, Gupta, Lian, Liu, *Staleness-aware Async-SGD for Distributed Deep Learning*, IJCAI 2016
    (arXiv:1511.05950), section 3.2. With W workers nearly every gradient is W - 1 updates late, so
    a rate that is good for one worker stays stable for any number of them.
    """

    def factor(self, staleness: int) -> float:
        return 1.0 / max(1, staleness)


@dataclass
class Polynomial(Correction):
    """The learning rate times (1 + tau) ** -exponent.

    Xie, Koyejo, Gupta, *Asynchronous Federated Optimization*, 2019 (arXiv:1903.03934), section 5.2,
    where the exponent is 0.5.

    Args:
        exponent: from 0 on; 0 changes nothing.
    """

    exponent: NotNegative = 0.5

    def factor(self, staleness: int) -> float:
        return float((1 + staleness) ** -self.exponent)


def high(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as float32 if it is of low precision, else itself."""
    return tensor.float() if tensor.dtype in _LOW else tensor


def zeros_like(buffers: dict[torch.dtype, torch.Tensor]) -> dict[torch.dtype, torch.Tensor]:
    """Zeros for each element, float32 for low precision."""
    return {dtype: torch.zeros_like(high(flat)) for dtype, flat in buffers.items()}


def check_real(store: Store, name: str) -> None:
    """Refuse complex parameters, for which elementwise corrections are not defined.

    Raises:
        UserError: naming one.
    """
    for slot in store.layout.slots:
        if slot.dtype.is_complex:
            raise UserError(
                f"correction={name} was given, but the parameter {slot.name} is of "
                f"{slot.dtype}, and it is defined for real ones; use correction=by_staleness or "
                "polynomial"
            )
