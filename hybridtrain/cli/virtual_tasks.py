"""A task of the command line for the virtual world, configured as for a training."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytorch_lightning as pl
from hydra.utils import instantiate
from omegaconf import DictConfig

from hybridtrain.cli import hydra_config
from hybridtrain.cli.explain import explain
from hybridtrain.cli.quiet import hush, hush_lightning
from hybridtrain.cli.validation.config_checks import check_config
from hybridtrain.cli.validation.target_checks import check_targets
from hybridtrain.errors import UserError
from hybridtrain.lightning.hooks.trainer_hooks import give_module
from hybridtrain.lightning.replay.module_task import ModuleTask, VirtualTrainer
from hybridtrain.lightning.run_context import strategy_of
from hybridtrain.protocol.messages import Clip

MakeLesson = Callable[[int], ModuleTask]  # number of workers -> a fresh one


def lessons(overrides: Sequence[str]) -> MakeLesson:
    """What makes the task that these overrides configure, as often as it is wanted.

    Raises:
        UserError: if they make no sense, or the task cannot be trained in virtual time.
    """
    hush()
    hush_lightning()
    overrides = hydra_config.complete_overrides(overrides)
    try:
        cfg = hydra_config.compose_config(overrides)
        cfg.run_dir = "."  # there is no run, and so no directory for one
        check_config(cfg, overrides)
        _check_trainer(cfg)
        check_targets(cfg)
    except Exception as error:
        raise _told(error, overrides) from error
    return lambda workers: _guarded(cfg, workers, overrides)


def usual_options(overrides: Sequence[str]) -> list[str]:
    """What the configuration has under ``simulate``, as ``name=value``.

    Raises:
        UserError: if there is no such configuration.
    """
    try:
        cfg = hydra_config.compose_config(hydra_config.complete_overrides(overrides))
    except Exception as error:
        raise _told(error, overrides) from error
    found = {n: v for n, v in (cfg.get("simulate") or {}).items() if v is not None}
    return [f"{n}={str(v).lower() if isinstance(v, bool) else v}" for n, v in found.items()]


def _told(error: Exception, overrides: Sequence[str]) -> Exception:
    """As one line, where it is a mistake of the user's."""
    line = explain(error, overrides)
    return error if line is None else UserError(line)


def _check_trainer(cfg: DictConfig) -> None:
    if cfg.trainer.accumulate_grad_batches != 1:
        raise UserError(
            f"trainer.accumulate_grad_batches={cfg.trainer.accumulate_grad_batches}: in virtual "
            "time every mini-batch is pushed; leave it at 1"
        )


def _guarded(cfg: DictConfig, workers: int, overrides: Sequence[str]) -> ModuleTask:
    try:
        return _lesson(cfg, workers)
    except Exception as error:
        raise _told(error, overrides) from error


def _lesson(cfg: DictConfig, workers: int) -> ModuleTask:
    seed = 0 if cfg.seed is None else int(cfg.seed)
    pl.seed_everything(seed, workers=False, verbose=False)
    module = instantiate(cfg.model, _convert_="all")
    data = instantiate(cfg.data, _convert_="all") if cfg.data.get("_target_") else None
    trainer = VirtualTrainer(workers)
    lesson = ModuleTask(module, trainer, _loader(module, data, trainer), seed, _clip(cfg))
    if cfg.trainer.max_epochs is not None and cfg.trainer.max_epochs >= 0:
        lesson.epochs = cfg.trainer.max_epochs
    return lesson


def _loader(module: Any, data: Any, trainer: VirtualTrainer) -> Any:
    """The training data's, after everything that has to come before."""
    module.trainer = trainer
    give_module(strategy_of(trainer), module)
    parts = [module] if data is None else [data, module]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for part in parts:
            part.trainer = trainer
            part.prepare_data()
            part.setup("fit")
        return parts[0].train_dataloader()


def _clip(cfg: DictConfig) -> Clip | None:
    limit = cfg.trainer.gradient_clip_val
    if not limit:
        return None
    return Clip(cfg.trainer.gradient_clip_algorithm or "norm", float(limit))
