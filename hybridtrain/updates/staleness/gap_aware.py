"""Gap-aware: divide a stale gradient by the movement of its parameters.

Barkai, Hakimi, Schuster, *Gap Aware Mitigation of Gradient Staleness*, ICLR 2020
(arXiv:1909.10802): each element of a gradient is divided by G = 1 + |w - w_read| / C, where C is
the length of a typical step of this element. If all steps have length C and one direction, G is
1 + tau; if they cancel, the gradient is not reduced.

In the paper C is the rate times the root mean square of the momentum (SGD), or of the steps (Adam).
Here it is always that of the steps, which is the same for SGD with a constant rate, follows a
schedule, and works with any optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hybridtrain.memory import Store
from hybridtrain.updates.staleness.correction import (
    Correction,
    Late,
    check_real,
    high,
    zeros_like,
)
from hybridtrain.updates.staleness.parts import Part, union
from hybridtrain.util.option_types import Above0, Decay


@dataclass
class GapAware(Correction):
    """Divide each element by 1 + (its gap in typical steps).

    It takes two floats for each parameter, and about three passes over them per update. The mean
    begins anew after loading a checkpoint, and is bias-corrected like Adam's moments. Of sparse
    gradients only rows with a gradient take part.

    Args:
        decay: of the mean square of the steps, in [0, 1).
        epsilon: added to C, in units of the parameters; above 0.
    """

    decay: Decay = 0.999
    epsilon: Above0 = 1e-8

    def begin(self, store: Store) -> None:
        check_real(store, "gap_aware")
        self._masters = store.masters
        self._squares = zeros_like(store.masters)
        self._known = zeros_like(store.masters)  # bias corrections, 1 - decay ** steps

    def correct(self, late: Late) -> None:
        if late.staleness == 0:
            return
        for part in late.parts():
            gradient, gap = late.gradient(part), late.gap(part)
            gradient.div_(gap.abs_().div_(self._typical_step(part)).add_(1.0))
            late.replace(part, gradient)

    def _typical_step(self, part: Part) -> torch.Tensor:
        """C of each element."""
        known = part.read(self._known).clamp(min=torch.finfo(torch.float32).tiny)
        return (part.read(self._squares) / known).sqrt_().add_(self.epsilon)

    @contextmanager
    def watch(self, merged: Sequence[Late]) -> Iterator[None]:
        parts = union([late.parts() for late in merged])
        before = [part.read(self._masters).clone() for part in parts]
        yield
        for part, old in zip(parts, before, strict=True):
            step = high(part.read(self._masters)) - high(old)
            self._learn(part, self._squares, step.square_())
            self._learn(part, self._known, torch.ones_like(step))

    def _learn(
        self, part: Part, means: dict[torch.dtype, torch.Tensor], values: torch.Tensor
    ) -> None:
        mean = part.read(means)
        part.write(means, mean.lerp_(values, 1 - self.decay))
