"""What the trainer does through its connectors, and what strategies and launchers are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.core.optimizer import _init_optimizers_and_lr_schedulers
from pytorch_lightning.strategies.launchers import (
    _MultiProcessingLauncher as ProcessLauncher,
)
from pytorch_lightning.strategies.launchers import (
    _SubprocessScriptLauncher as ScriptLauncher,
)
from pytorch_lightning.strategies.launchers.launcher import _Launcher as Launcher
from pytorch_lightning.strategies.launchers.multiprocessing import (
    _GlobalStateSnapshot as GlobalState,
)
from pytorch_lightning.trainer import call
from pytorch_lightning.trainer.connectors.checkpoint_connector import _CheckpointConnector
from pytorch_lightning.utilities.exceptions import _TunerExitException as TunerExit

__all__ = ["GlobalState", "Launcher", "ProcessLauncher", "ScriptLauncher", "TunerExit"]

MODULE = "_lightning_module"  # where a strategy keeps it
RUNNING_HOOK = "_current_fx_name"  # where a module notes the hook that runs

# ---- checkpoints --------------------------------------------------------------------------------


def dumper(trainer: Any) -> Any:
    """Whose ``dump_checkpoint`` puts every checkpoint together."""
    return trainer._checkpoint_connector


def dump_checkpoint(trainer: Any) -> dict[str, Any]:
    """What a checkpoint would hold now."""
    return dumper(trainer).dump_checkpoint(False)


def dump_at_once(trainer: Any) -> dict[str, Any]:
    """The same, without what was made to run before."""
    return _CheckpointConnector.dump_checkpoint(dumper(trainer), False)


def checkpoint_plugin(strategy: Any) -> Any:
    """What writes checkpoints; ``None``: nobody has asked for it yet, or given one."""
    return strategy._checkpoint_io


# ---- the trainer's course -----------------------------------------------------------------------


def leave_signals_alone(trainer: Any) -> None:
    """The trainer installs no handlers."""
    trainer._signal_connector.register_signal_handlers = lambda: None


def requeue_slurm_job(trainer: Any, signum: int) -> None:
    """What Lightning does at SLURM's warning: save, and queue the job again."""
    trainer._signal_connector._slurm_sigusr_handler_fn(signum, None)


def step_scheduler(trainer: Any, scheduler: Any) -> None:
    """By the module's ``lr_scheduler_step``, which users may have one of their own for."""
    call._call_lightning_module_hook(trainer, "lr_scheduler_step", scheduler, None)


def tear_down(trainer: Any) -> None:
    """After a run that has ended as it should: hooks first."""
    call._call_teardown_hook(trainer)
    trainer._teardown()


def end_interrupted(trainer: Any, error: BaseException) -> None:
    """After a run that ``error`` has ended: callbacks and loggers hear of it."""
    call._interrupt(trainer, error)
    trainer._teardown()


def attach_data(trainer: Any, given: Mapping[str, Any]) -> None:
    """Let the loops get their loaders from the arguments of the trainer function."""
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
    """Those of ``configure_callbacks``."""
    trainer._callback_connector._attach_model_callbacks()


# ---- the module ---------------------------------------------------------------------------------


def give_module(strategy: Any, module: pl.LightningModule) -> None:
    """To a strategy that launches nothing."""
    strategy._lightning_module = module


def forget_compiler(module: Any) -> None:
    """Lightning marks a compiled module, and refuses strategies but its own for it."""
    module._compiler_ctx = None


def configured_optimizers(module: pl.LightningModule) -> tuple[list[Any], list[Any]]:
    """Optimizers and schedulers, as ``configure_optimizers`` makes them."""
    optimizers, schedulers = _init_optimizers_and_lr_schedulers(module)
    return list(optimizers), list(schedulers)


def plain_optimizer(optimizer: Any) -> Any:
    """The one inside of Lightning's wrapper, if there is a wrapper."""
    return getattr(optimizer, "_optimizer", optimizer)


def layer_sync(strategy: Any) -> Any:
    """How batch normalisation is synchronised; ``None``: not at all."""
    return strategy._layer_sync
