"""The learning-rate finder runs in the workers; what it has found belongs in the calling process.

There the user reads ``finder.suggestion()`` or ``module.lr``, as after a search in that process.
"""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import LearningRateFinder
from pytorch_lightning.utilities.parsing import lightning_getattr, lightning_setattr

from hybridtrain.lightning.hooks.callback_hooks import searched_attribute


def what_was_found(finder: LearningRateFinder, module: pl.LightningModule) -> dict[str, Any]:
    """The curve of losses, and the learning rate that the module has now."""
    found: dict[str, Any] = {"optimal_lr": finder.optimal_lr}
    if (name := searched_attribute(finder, module)) is not None:
        found["attribute"] = (name, lightning_getattr(module, name))
    return found


def take_what_was_found(
    finder: LearningRateFinder, module: pl.LightningModule, found: dict[str, Any]
) -> None:
    """The other half, in the calling process."""
    finder.optimal_lr = found["optimal_lr"]
    if "attribute" in found:
        lightning_setattr(module, *found["attribute"])
