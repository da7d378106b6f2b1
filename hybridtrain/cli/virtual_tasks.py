"""Tasks for virtual time, configured like a training on the command line."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytorch_lightning as pl
from hydra.utils import instantiate
from omegaconf import DictConfig

from hybridtrain.cli import hydra_config
from hybridtrain.cli.explain import explain
from hybridtrain.cli.quiet import hush, hush_lightning
from hybridtrain.cli.validation.config_checks import check_config
from hybridtrain.cli.validation.target_checks import check_targets
from hybridtrain.engine.exchanges import Requirements
from hybridtrain.engine.protocol.messages import Clip
from hybridtrain.errors import UserError
from hybridtrain.lightning.replay.module_task import ModuleTask, VirtualTrainer, training_loader

MakeLesson = Callable[[int, Requirements], ModuleTask]  # for so many workers; a fresh task


def lessons(overrides: Sequence[str]) -> MakeLesson:
    """A function that makes the task configured by these overrides.

    Raises:
        UserError: if the overrides are invalid, or the task cannot be trained in virtual time.
    """
    hush()
    hush_lightning()
    overrides = hydra_config.complete_overrides(overrides)
    with _explained(overrides):
        cfg = hydra_config.compose_config(overrides)
        cfg.run_dir = "."  # there is no run, and so no directory for one
        check_config(cfg, overrides)
        if (n := cfg.trainer.accumulate_grad_batches) != 1:
            raise UserError(
                f"trainer.accumulate_grad_batches={n}: in virtual time every mini-batch is pushed; "
                "leave it at 1"
            )
        check_targets(cfg)

    def make(workers: int, requirements: Requirements) -> ModuleTask:
        with _explained(overrides):
            return _lesson(cfg, workers, requirements)

    return make


def usual_options(overrides: Sequence[str]) -> list[str]:
    """The configuration's options under ``simulate``, as ``name=value``.

    Raises:
        UserError: if the overrides are invalid.
    """
    with _explained(overrides):
        cfg = hydra_config.compose_config(hydra_config.complete_overrides(overrides))
    found = {n: v for n, v in (cfg.get("simulate") or {}).items() if v is not None}
    return [f"{n}={str(v).lower() if isinstance(v, bool) else v}" for n, v in found.items()]


@contextmanager
def _explained(overrides: Sequence[str]) -> Iterator[None]:
    """Turn mistakes of the user's into one-line UserErrors."""
    try:
        yield
    except Exception as error:
        if (line := explain(error, overrides)) is None:
            raise
        raise UserError(line) from error


def _lesson(cfg: DictConfig, workers: int, requirements: Requirements) -> ModuleTask:
    seed = 0 if cfg.seed is None else int(cfg.seed)
    pl.seed_everything(seed, workers=False, verbose=False)
    module = instantiate(cfg.model, _convert_="all")
    data = instantiate(cfg.data, _convert_="all") if cfg.data.get("_target_") else None
    trainer = VirtualTrainer(workers)
    most = cfg.trainer.max_epochs
    epochs = math.inf if most is None or most < 0 else most
    loader = training_loader(module, data, trainer)
    return ModuleTask(module, trainer, loader, seed, _clip(cfg), epochs, requirements)


def _clip(cfg: DictConfig) -> Clip | None:
    limit = cfg.trainer.gradient_clip_val
    if not limit:
        return None
    return Clip(cfg.trainer.gradient_clip_algorithm or "norm", float(limit))
