"""What a user should hear about gradients that arrive late."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch

from hybridtrain.exchanges import Requirements
from hybridtrain.updates.staleness import Correction

_NOTEWORTHY = 0.5  # updates: as stale as with one and a half workers


def check_correction(
    correction: Correction | None, requirements: Requirements, policy: Any
) -> None:
    """Say so where a correction has nothing to do: in a sweep over strategies it may well stay."""
    if correction is not None and requirements.whole_rounds:
        warnings.warn(
            f"correction={correction} was given, but under policy {policy} no gradient is ever "
            "late, so it changes nothing",
            stacklevel=2,
        )


def advise(optimizers: Iterable[torch.optim.Optimizer], staleness: float) -> None:
    """Warn of a momentum that comes on top of what lateness does already.

    Gradients that are tau updates late on average act like a momentum of tau / (1 + tau): for M
    workers of random speed that is 1 - 1/M (Mitliagkas et al., *Asynchrony begets Momentum*, 2016,
    arXiv:1605.09774, theorem 3).
    """
    momenta = [(o, g.get("momentum")) for o in optimizers for g in o.param_groups]
    for optimizer, momentum in momenta:
        if staleness >= _NOTEWORTHY and isinstance(momentum, float) and momentum > 0:
            warnings.warn(
                f"gradients are {staleness:.1f} updates late on average, which acts like a "
                f"momentum of {staleness / (1 + staleness):.2f} on top of the {momentum:g} of "
                f"{type(optimizer).__name__} (Mitliagkas et al. 2016); try a smaller momentum or "
                "learning rate, or strategy.correction=gap_aware",
                stacklevel=2,
            )
            return
