"""Private parts of the trainer: connectors, teardown, strategies, launchers, modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import LearningRateFinder, ModelCheckpoint, Timer, WeightAveraging
from pytorch_lightning.core.optimizer import _init_optimizers_and_lr_schedulers
from pytorch_lightning.strategies.launchers import _MultiProcessingLauncher as ProcessLauncher
from pytorch_lightning.strategies.launchers import _SubprocessScriptLauncher as ScriptLauncher
from pytorch_lightning.strategies.launchers.launcher import _Launcher as Launcher
from pytorch_lightning.strategies.launchers.multiprocessing import (
    _GlobalStateSnapshot as GlobalState,
)
from pytorch_lightning.trainer import call
from pytorch_lightning.trainer.connectors.checkpoint_connector import _CheckpointConnector
from pytorch_lightning.tuner.lr_finder import _determine_lr_attr_name
from pytorch_lightning.utilities.exceptions import _TunerExitException as TunerExit

from hybridtrain.lightning.hooks.points import Point, instead

__all__ = ["GlobalState", "Launcher", "ProcessLauncher", "ScriptLauncher", "TunerExit"]

MODULE = "_lightning_module"  # of a strategy
RUNNING_HOOK = "_current_fx_name"  # of a module: the name of the running hook

# ---- checkpoints --------------------------------------------------------------------------------


def dumper(trainer: Any) -> Any:
    """The connector that makes and restores checkpoints."""
    return trainer._checkpoint_connector


def dump_checkpoint(trainer: Any) -> dict[str, Any]:
    """The content of a checkpoint, now."""
    return dumper(trainer).dump_checkpoint(False)


def dump_at_once(trainer: Any) -> dict[str, Any]:
    """The same, without the listeners of ``dump_checkpoint``."""
    return _CheckpointConnector.dump_checkpoint(dumper(trainer), False)


def checkpoint_plugin(strategy: Any) -> Any:
    """The plugin that writes checkpoints; ``None``: the default."""
    return strategy._checkpoint_io


# ---- runs ---------------------------------------------------------------------------------------


def leave_signals_alone(trainer: Any) -> None:
    """Let the trainer install no signal handlers."""
    instead(Point.SIGNALS, trainer._signal_connector, install_nothing)


def install_nothing() -> None:
    """In place of Lightning's installing of signal handlers."""


def requeue_slurm_job(trainer: Any, signum: int) -> None:
    """Save and requeue the job, as Lightning does at SLURM's warning."""
    trainer._signal_connector._slurm_sigusr_handler_fn(signum, None)


def step_scheduler(trainer: Any, scheduler: Any) -> None:
    """Step by the module's ``lr_scheduler_step``, which users may override."""
    call._call_lightning_module_hook(trainer, "lr_scheduler_step", scheduler, None)


def tear_down(trainer: Any) -> None:
    """End a run that has finished: hooks, then the trainer's teardown."""
    call._call_teardown_hook(trainer)
    trainer._teardown()


def end_interrupted(trainer: Any, error: BaseException) -> None:
    """End a run that ``error`` has interrupted: ``on_exception``, loggers, teardown."""
    call._interrupt(trainer, error)
    trainer._teardown()


def attach_data(trainer: Any, given: Mapping[str, Any]) -> None:
    """Set the loops' loaders from the arguments of the trainer function."""
    fit = trainer.state.fn == "fit"
    stage = str(trainer.state.fn.value)
    stages = ("train", "val") if fit else ({"validate": "val"}.get(stage, stage),)
    names = {f"{stage}_dataloaders" if fit else "dataloaders": stage for stage in stages}
    loaders = {f"{stage}_dataloaders": given.get(name) for name, stage in names.items()}
    data = given.get("datamodule")
    for name, each in loaders.items():
        if isinstance(each, pl.LightningDataModule):
            data, loaders[name] = each, None
    trainer._data_connector.attach_data(trainer.lightning_module, **loaders, datamodule=data)


def attach_module_callbacks(trainer: Any) -> None:
    """Add the callbacks of ``configure_callbacks``."""
    trainer._callback_connector._attach_model_callbacks()


# ---- the module ---------------------------------------------------------------------------------


def give_module(strategy: Any, module: pl.LightningModule) -> None:
    """Set the module of a strategy that launches nothing."""
    strategy._lightning_module = module


def forget_compiler(module: Any) -> None:
    """Remove the mark of a compiled module, for which Lightning refuses other strategies."""
    module._compiler_ctx = None


def configured_optimizers(module: pl.LightningModule) -> tuple[list[Any], list[Any]]:
    """Optimizers and schedulers, as ``configure_optimizers`` makes them."""
    optimizers, schedulers = _init_optimizers_and_lr_schedulers(module)
    return list(optimizers), list(schedulers)


def plain_optimizer(optimizer: Any) -> Any:
    """The optimizer inside Lightning's wrapper, or the given one."""
    return getattr(optimizer, "_optimizer", optimizer)


def layer_sync(strategy: Any) -> Any:
    """The plugin that synchronises batch normalisation; ``None``: none."""
    return strategy._layer_sync


# ---- private attributes and methods of Lightning's callbacks and loggers ------------------------

# State of a ModelCheckpoint's decisions.
DECIDED = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")
HOW_IT_STEPS = "_automatic_optimization"  # of a module
CURRENT = "current_model_state"  # in checkpoints of callbacks that average weights: the module's
WRITER = "_experiment"  # of a logger: the object behind ``logger.experiment``, with threads, files

# ---- Timer --------------------------------------------------------------------------------------


def forget_times(timer: Timer) -> None:
    """Forget an earlier training's, or a new one's limit would be held to its end."""
    timer._start_time = dict.fromkeys(timer._start_time)
    timer._end_time = dict.fromkeys(timer._end_time)


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


def scaler_of(trainer: Any) -> Any:
    """The gradient scaler of the precision plugin; ``None``: there is none."""
    return getattr(trainer.precision_plugin, "scaler", None)


def averages_of(callback: pl.Callback) -> torch.nn.Module | None:
    """The module of a callback that averages weights, once it has one."""
    return callback._average_model if isinstance(callback, WeightAveraging) else None


def swap_weights(callback: WeightAveraging, module: pl.LightningModule) -> None:
    """Exchange the module's weights and the averaged ones."""
    callback._swap_models(module)


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
