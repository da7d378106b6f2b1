"""Modules that step their parameters themselves, without an optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from pytorch_lightning import LightningModule


class NoOptimizer(torch.optim.Optimizer):
    """Stands for the module, which steps its trainable parameters itself."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__([p for p in module.parameters() if p.requires_grad], {})

    def step(self, closure: Any = None) -> Any:
        """Nothing."""


def writes_itself(
    module: LightningModule, optimizers: Iterable[torch.optim.Optimizer], shared: bool
) -> bool:
    """Whether the module steps its parameters without an optimizer, which all ``shared``."""
    given = any(optimizer.param_groups for optimizer in optimizers)  # Lightning's stand-in has none
    if given or module.automatic_optimization:
        return False
    if not shared:
        name = type(module).__name__
        rank_zero_warn(
            f"{name} has no optimizer under this strategy: what it writes to its parameters is "
            "each worker's own, and worker 0's is kept; use strategy=hogwild to share them, or "
            "return an optimizer from configure_optimizers"
        )
    return shared
