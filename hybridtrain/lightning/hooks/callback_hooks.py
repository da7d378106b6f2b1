"""Lightning's callbacks and loggers: what they know and decide under private names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import LearningRateFinder, ModelCheckpoint
from pytorch_lightning.tuner.lr_finder import _determine_lr_attr_name

# Of a ModelCheckpoint: what it has decided.
DECIDED = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")
DECIDING = "_monitor_candidates"  # the method that begins it
HOW_IT_STEPS = "_automatic_optimization"  # of a module
WRITER = "_experiment"  # where loggers keep what is behind ``logger.experiment``: threads, files

# ---- ModelCheckpoint ----------------------------------------------------------------------------


def saves_every(callback: ModelCheckpoint) -> int:
    """Its ``every_n_train_steps``."""
    return callback._every_n_train_steps


def save_every(callback: ModelCheckpoint, steps: int) -> None:
    """Set it; ``steps`` may be an ``int`` that takes remainders in its own way."""
    callback._every_n_train_steps = steps


def has_saved(callback: Any, step: int) -> None:
    """Let it believe that it has."""
    vars(callback)[DECIDED[0]] = step


def replace_finding(callback: Any, by: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """How it looks for ``ckpt_path="last"``; ``by`` wraps what it has done until now."""
    callback._find_last_checkpoints = by(callback._find_last_checkpoints)


def replace_linking(callback: Any, by: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """How it links ``last.ckpt``."""
    callback._link_checkpoint = by(callback._link_checkpoint)


def replace_saving(callback: Any, by: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """How it saves one file."""
    callback._save_checkpoint = by(callback._save_checkpoint)


def saves_as_lightning(callback: ModelCheckpoint) -> bool:
    """Whether its class has left saving as it is."""
    kind: Any = type(callback)
    return (
        kind._save_checkpoint is ModelCheckpoint._save_checkpoint
        and kind.file_exists is ModelCheckpoint.file_exists
    )


# ---- the search for a learning rate -------------------------------------------------------------


def searched_attribute(finder: LearningRateFinder, module: pl.LightningModule) -> str | None:
    """The module's attribute that a search sets; ``None``: it sets none."""
    return _determine_lr_attr_name(module, finder._attr_name) if finder._update_attr else None


# ---- loggers ------------------------------------------------------------------------------------


def writer_of(logger: Any) -> Any:
    """``None``: it has not been opened."""
    return vars(logger).get(WRITER)


def set_writer(logger: Any, writer: Any) -> None:
    """Instead of one that would be opened."""
    setattr(logger, WRITER, writer)


def uploads_checkpoints(logger: Any) -> bool:
    """Whether a logger that can may do so."""
    return bool(getattr(logger, "_log_model", True))


def purge_from(logger: Any, step: int) -> None:
    """TensorBoard hides what was logged from this step on."""
    logger._kwargs.setdefault("purge_step", step)
