"""Test a trained module: every sample once, in one process.

A distributed sampler repeats samples until the shares are equal, and metrics of unequal shares do
not average to those of the whole. So the test runs on one device, in the process that started the
training, whatever trained the weights. Only where each rank is a program of its own (Lightning's
``popen``) all ranks have to take part.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytorch_lightning as pl
from omegaconf import DictConfig
from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities.model_helpers import is_overridden

from hybridtrain.cli.best_checkpoint import logged
from hybridtrain.errors import UserError
from hybridtrain.lightning.hooks.trainer_hooks import ScriptLauncher
from hybridtrain.lightning.results.full_disk import let_write
from hybridtrain.lightning.run_context import strategy_of

# The trainer's options that matter to a test.
_SHARED = ("precision", "limit_test_batches", "deterministic", "benchmark", "inference_mode")


@dataclass(frozen=True, slots=True)
class Subject:
    """What is tested: a module with its data, in the state of a checkpoint (None: as it is)."""

    module: pl.LightningModule
    data: pl.LightningDataModule | None
    ckpt: str | None


def has_test(module: pl.LightningModule, data: pl.LightningDataModule | None) -> bool:
    """Whether the module can be tested and there is something to test it on."""
    source = module if data is None else data
    return is_overridden("test_step", module) and is_overridden("test_dataloader", source)


def evaluate(
    cfg: DictConfig, trainer: pl.Trainer, subject: Subject, loggers: list[Logger]
) -> dict[str, float]:
    """Test ``subject`` and return its metrics. Raises UserError when it has no test."""
    if not has_test(subject.module, subject.data):
        raise UserError(f"task {cfg.task.name!r} has no test set; leave test_only=true away")
    launcher = strategy_of(trainer).launcher
    if not isinstance(launcher, ScriptLauncher) or trainer.world_size == 1:
        trainer = _single(cfg, trainer, loggers)
    trainer.test(
        subject.module,
        datamodule=subject.data,
        ckpt_path=subject.ckpt,
        verbose=False,
        weights_only=True if cfg.test_only else None,
    )
    return logged(trainer)


def _single(cfg: DictConfig, trainer: pl.Trainer, loggers: list[Logger]) -> pl.Trainer:
    let_write(loggers)
    on_gpu = type(trainer.accelerator).__name__ == "CUDAAccelerator"
    return pl.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=1,
        logger=loggers or False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=cfg.run_dir,
        **{name: cfg.trainer[name] for name in _SHARED},
    )
