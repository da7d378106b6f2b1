"""Refuse options of the trainer that the strategy cannot run."""

from __future__ import annotations

import multiprocessing
from typing import Any

import torch
from pytorch_lightning.accelerators import CPUAccelerator
from pytorch_lightning.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from pytorch_lightning.plugins.layer_sync import TorchSyncBatchNorm

from hybridtrain.errors import UserError
from hybridtrain.lightning.hooks.loop_hooks import validation_seconds
from hybridtrain.lightning.hooks.trainer_hooks import layer_sync
from hybridtrain.lightning.run_context import cluster_environment, strategy_of
from hybridtrain.lightning_package import decide, is_foreign, other_than, refuse_mixture
from hybridtrain.memory import overlapping
from hybridtrain.worker.device import KINDS


def check_trainer(trainer: Any, whole_rounds: bool) -> None:
    """Check the trainer's options against the policy.

    Raises:
        UserError: naming the option, what is allowed, and what to do.
    """
    _check_process()
    _check_package(trainer)
    _check_accelerator(trainer.accelerator)
    _check_environment(cluster_environment(trainer))
    if trainer.state.fn != "fit":
        return
    if any(isinstance(callback, BatchSizeFinder) for callback in trainer.callbacks):
        raise UserError(
            "the callback BatchSizeFinder was given, but one worker cannot find a batch size for "
            "all; find it first with strategy='auto', devices=1, and give it to your loader"
        )
    if not whole_rounds:
        if any(isinstance(callback, LearningRateFinder) for callback in trainer.callbacks):
            raise UserError(
                "a search for the learning rate was asked for, but workers that run freely are "
                "never at the same step of it; search with strategy=hybrid"
            )
        if isinstance(layer_sync(strategy_of(trainer)), TorchSyncBatchNorm):
            raise UserError(
                "sync_batchnorm=True was given, but workers that run freely are never at the same "
                "layer together; leave it out, or use strategy=hybrid"
            )
        _check_averaging(trainer)
        _check_interval(trainer)
        _check_limit(trainer)


def _check_averaging(trainer: Any) -> None:
    """For the statistics of BatchNorm, this callback goes through the loaders once more."""
    module = trainer.lightning_module
    norms = any(
        isinstance(each, torch.nn.modules.batchnorm._BatchNorm) for each in module.modules()
    )
    if norms and any(isinstance(each, StochasticWeightAveraging) for each in trainer.callbacks):
        raise UserError(
            "the callback StochasticWeightAveraging was given with a module that has BatchNorm, "
            "whose statistics take one more pass over the data, but workers that run freely draw "
            "from one queue, once an epoch; use EMAWeightAveraging, or strategy=hybrid"
        )


def _check_process() -> None:
    """Daemonic processes, as those of a ``multiprocessing.Pool`` are, may have no children."""
    process = multiprocessing.current_process()
    if process.daemon:
        raise UserError(
            f"training was started in {process.name}, a daemonic process (of a "
            "multiprocessing.Pool?), which may start no workers; use "
            "concurrent.futures.ProcessPoolExecutor, or multiprocessing.Process(daemon=False)"
        )


def _check_package(trainer: Any) -> None:
    """Lightning itself refuses a module of its other package, but no other part."""
    parts = (*trainer.callbacks, *trainer.loggers, getattr(trainer, "datamodule", None))
    for part in filter(is_foreign, parts):
        raise refuse_mixture(type(part).__name__, other_than(decide()))


def _check_accelerator(accelerator: Any) -> None:
    if not isinstance(accelerator, CPUAccelerator) and type(accelerator).name() not in KINDS:
        raise UserError(
            f"accelerator={type(accelerator).name()!r} was given or found, but workers compute on "
            "'cpu' or 'cuda'; use Trainer(accelerator='cpu')"
        )


def _check_environment(environment: Any) -> None:
    """Refuse processes started externally: each would train a model of its own."""
    if environment is None or not environment.creates_processes_externally:
        return
    try:
        n_started = environment.world_size()
    except KeyError:  # SLURM's, given by hand where there is no SLURM
        return
    if n_started > 1:
        raise UserError(
            f"this is one of {n_started} processes that {type(environment).__name__} has started, "
            "but the workers of one training are started by trainer.fit itself; start the script "
            "once (python script.py, srun --ntasks=1) and say Trainer(devices=...), or use "
            "strategy='ddp'"
        )


def _check_interval(trainer: Any) -> None:
    interval = getattr(trainer, "val_check_interval", None)
    if (seconds := validation_seconds(trainer)) is not None:
        interval = f"{seconds:.0f} s"
    if interval not in (None, 1.0) or isinstance(interval, int):
        raise UserError(
            f"val_check_interval={interval} was given, but workers that run freely meet only at "
            "the end of an epoch; leave it at 1.0 (and use check_val_every_n_epoch), or use "
            "strategy=hybrid"
        )


def _check_limit(trainer: Any) -> None:
    for name in ("overfit_batches", "limit_train_batches"):
        limit = getattr(trainer, name)
        if isinstance(limit, float) and limit not in (0.0, 1.0):
            raise UserError(
                f"{name}={limit} was given, but workers that draw from one queue have no share to "
                "take a part of; give a whole number of mini-batches per worker, or use "
                "strategy=hybrid"
            )


def check_parameters(module: torch.nn.Module) -> None:
    """Check that parameters share no memory.

    Raises:
        UserError: naming two that do.
    """
    found = overlapping(module.named_parameters(remove_duplicate=False))
    if found is None:
        return
    one, other = found
    if one == other:
        raise UserError(
            f"the elements of parameter {one} share memory with one another (expand()?), and would "
            "come apart in shared memory; use .clone(), or keep the small one and expand it in "
            "forward"
        )
    raise UserError(
        f"the parameters {one} and {other} are two that share memory, and would come apart; tie "
        "them by giving both modules one and the same torch.nn.Parameter, or clone one"
    )
