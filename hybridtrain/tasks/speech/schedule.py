"""The learning rate of the speech task: a short rise, then a cosine down to zero, per epoch."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hybridtrain.util.option_types import Natural, typed


@typed("model.scheduler.")
def rise_and_fall(optimizer: Optimizer, epochs: int | None, rise: Natural = 1) -> LambdaLR:
    """Factor (e + 1) / (rise + 1) in epochs e < ``rise``, then a half cosine ending at ``epochs``.

    For a schedule that steps once per epoch. Without an end (``epochs`` None or -1, as Lightning's
    max_epochs may be) it stays at 1. A run that goes on with more epochs follows the new end.
    """

    def factor(epoch: int) -> float:
        if epoch < rise:
            return (epoch + 1) / (rise + 1)
        if epochs is None or epochs <= rise:
            return 1.0
        done = min(1.0, (epoch - rise) / (epochs - rise))
        return 0.5 * (1.0 + math.cos(math.pi * done))

    return LambdaLR(optimizer, factor)
