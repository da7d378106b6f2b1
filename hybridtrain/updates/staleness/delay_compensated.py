"""Delay compensation: correct a stale gradient with an estimate of the curvature.

Zheng et al., *Asynchronous Stochastic Gradient Descent with Delay Compensation*, ICML 2017
(arXiv:1609.08326): the gradient at w is about g + H (w - w_read), and for losses that are negative
log-likelihoods the diagonal of H is E[g * g] (section 3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridtrain.memory import Store
from hybridtrain.updates.staleness.correction import (
    Correction,
    Late,
    check_real,
    zeros_like,
)
from hybridtrain.util.option_types import Decay, NotNegative

_EPSILON = 1e-7  # section 5


@dataclass
class DcAsgd(Correction):
    """g + strength * g * g * (w - w_read), algorithm DC-ASGD-c. One pass over stale gradients.

    Args:
        strength: the paper's lambda, in units of 1 / loss; 0 changes nothing. The default suits
            gradients of a mean loss.
    """

    strength: NotNegative = 0.04

    def begin(self, store: Store) -> None:
        check_real(store, "dc_asgd")

    def correct(self, late: Late) -> None:
        if late.staleness == 0 or self.strength == 0:
            return
        for part in late.parts():
            gradient, gap = late.gradient(part), late.gap(part)
            gradient.addcmul_(gap.mul_(gradient), gradient, value=self.strength)
            late.replace(part, gradient)


@dataclass
class DcAsgdAdaptive(Correction):
    """The same with strength / sqrt(ms + 1e-7) for each element, algorithm DC-ASGD-a.

    ``ms`` is the moving mean of the worker's squared gradients. It begins at 0, also after loading
    a checkpoint (the default needs some 50 mini-batches), and takes one more float for each
    parameter and worker. Of sparse gradients only rows with a gradient take part.

    Args:
        strength: the paper's lambda_0; 0 changes nothing.
        decay: of the mean, in [0, 1).
    """

    strength: NotNegative = 2.0
    decay: Decay = 0.95

    def begin(self, store: Store) -> None:
        check_real(store, "dc_asgd_adaptive")
        self._squares: dict[int, dict[torch.dtype, torch.Tensor]] = {}  # worker -> dtype -> (P,)

    def correct(self, late: Late) -> None:
        squares = self._squares.setdefault(late.worker, zeros_like(late.store.masters))
        for part in late.parts():
            gradient, mean = late.gradient(part), part.read(squares)
            mean.mul_(self.decay).addcmul_(gradient, gradient, value=1 - self.decay)
            part.write(squares, mean)
            if late.staleness == 0 or self.strength == 0:
                continue
            gap = late.gap(part).mul_(gradient).div_((mean + _EPSILON).sqrt_())
            gradient.addcmul_(gap, gradient, value=self.strength)
            late.replace(part, gradient)
