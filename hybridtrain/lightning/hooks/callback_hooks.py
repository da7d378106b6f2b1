"""Private attributes and methods of Lightning's callbacks and loggers."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import LearningRateFinder, ModelCheckpoint
from pytorch_lightning.tuner.lr_finder import _determine_lr_attr_name

# State of a ModelCheckpoint's decisions.
DECIDED = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")
HOW_IT_STEPS = "_automatic_optimization"  # of a module
WRITER = "_experiment"  # of a logger: the object behind ``logger.experiment``, with threads, files

# ---- ModelCheckpoint ----------------------------------------------------------------------------


def saves_every(callback: ModelCheckpoint) -> int:
    """Its ``every_n_train_steps``."""
    return callback._every_n_train_steps


def save_every(callback: ModelCheckpoint, steps: int) -> None:
    """Set it; ``steps`` may be a subclass of ``int`` with its own remainders."""
    callback._every_n_train_steps = steps


def has_saved(callback: Any, step: int) -> None:
    """Let the callback treat this step as saved."""
    vars(callback)[DECIDED[0]] = step


def saves_as_lightning(callback: ModelCheckpoint) -> bool:
    """Whether its class does not override saving."""
    kind: Any = type(callback)
    return (
        kind._save_checkpoint is ModelCheckpoint._save_checkpoint
        and kind.file_exists is ModelCheckpoint.file_exists
    )


# ---- the search for a learning rate -------------------------------------------------------------


def searched_attribute(finder: LearningRateFinder, module: pl.LightningModule) -> str | None:
    """The module's attribute that the search sets; ``None``: none."""
    return _determine_lr_attr_name(module, finder._attr_name) if finder._update_attr else None


# ---- loggers ------------------------------------------------------------------------------------


def writer_of(logger: Any) -> Any:
    """The logger's writer; ``None``: not opened."""
    return vars(logger).get(WRITER)


def set_writer(logger: Any, writer: Any) -> None:
    """Set the writer, so that none is opened."""
    setattr(logger, WRITER, writer)


def uploads_checkpoints(logger: Any) -> bool:
    """Whether a logger's option ``log_model`` allows uploads."""
    return bool(getattr(logger, "_log_model", True))


def purge_from(logger: Any, step: int) -> None:
    """Let TensorBoard hide rows from this step on."""
    logger._kwargs.setdefault("purge_step", step)
