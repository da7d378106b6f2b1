"""Where training is now, from where it was some steps ago. In lock-step that can be counted."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl

from hybridtrain.lightning.resume import KEY
from hybridtrain.spans import split, total


def can_be_advanced(checkpoint: dict[str, Any], trainer: Any) -> bool:
    """Whether it says all that is needed; where workers run freely the shared queue knows it."""
    if not trainer.strategy.regime.lockstep:
        return True
    loaders = checkpoint.get(KEY, {}).get("loaders", [])
    return len(loaders) == 1 and trainer.lightning_module.automatic_optimization


def advance(checkpoint: dict[str, Any], steps: int, trainer: pl.Trainer) -> None:
    """Let ``steps`` more be done of the epoch."""
    if steps <= 0:
        return
    ours = checkpoint[KEY]
    (loader,) = ours["loaders"]
    left = total(loader["spans"])
    batches = min(steps * int(trainer.accumulate_grad_batches), -(-left // loader["whole"]))
    ours["batches"] += batches
    loader["batches"] += batches
    rest = split([tuple(span) for span in loader["spans"]], batches * loader["whole"])[1]
    loader["spans"] = [list(span) for span in rest]
