"""Brings a checkpoint of some steps ago up to now. In lock-step the steps since can be counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl

from hybridtrain.lightning.checkpointing.mid_epoch import KEY
from hybridtrain.lightning.data.samplers import EpochSampler
from hybridtrain.lightning.hooks.loop_hooks import add_to_saved_logged_step
from hybridtrain.lightning.run_context import context_of
from hybridtrain.protocol.spans import split, total


def can_be_advanced(trainer: Any, samplers: Sequence[EpochSampler]) -> bool:
    """Whether a checkpoint of now will say all that is needed.

    In lock-step that is one loader, of which something has been drawn in this epoch, and one step
    for so many mini-batches. Where workers run freely, the shared queue knows what is left.
    """
    if not context_of(trainer).requirements.whole_rounds:
        return True
    begun = [sampler.has_begun(trainer.current_epoch) for sampler in samplers]
    return begun == [True] and bool(trainer.lightning_module.automatic_optimization)


def advance(checkpoint: dict[str, Any], steps: int, trainer: pl.Trainer) -> None:
    """Let ``steps`` more be done of the epoch."""
    if steps <= 0:
        return
    ours = checkpoint[KEY]
    (loader,) = ours["loaders"]
    left = total(loader["spans"])
    batches = min(steps * int(trainer.accumulate_grad_batches), -(-left // loader["whole"]))
    ours["batches"] += batches
    add_to_saved_logged_step(checkpoint["loops"]["fit_loop"], steps)
    loader["batches"] += batches
    rest = split([tuple(span) for span in loader["spans"]], batches * loader["whole"])[1]
    loader["spans"] = [list(span) for span in rest]
