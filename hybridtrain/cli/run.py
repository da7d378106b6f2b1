"""One run: build what the configuration names, train it, test the best checkpoint, sum up."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from hydra.core.hydra_config import HydraConfig
from lightning_utilities.core.rank_zero import rank_zero_warn
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.callbacks import (
    Callback,
    Checkpoint,
    LearningRateMonitor,
    ProgressBar,
)
from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger
from pytorch_lightning.strategies import Strategy
from pytorch_lightning.utilities.model_helpers import is_overridden

from hybridtrain.cli.best_checkpoint import best_checkpoint, has_validated, metrics_of
from hybridtrain.cli.ending import mapping_signals, no_process_left, terminating
from hybridtrain.cli.evaluate import Subject, evaluate, has_test
from hybridtrain.cli.exit_status import BAD_INPUT, FAILED, CommandOutcome, guarded, printed
from hybridtrain.cli.quiet import hush_lightning
from hybridtrain.cli.replay.record_header import describe_run, seed_all
from hybridtrain.cli.resume.continued_logs import go_on
from hybridtrain.cli.resume.kept_runs import newest
from hybridtrain.cli.run_directory import begin, keeping_whole, unsaved, writable
from hybridtrain.cli.sweep import job_process
from hybridtrain.cli.telemetry import summary
from hybridtrain.cli.telemetry.monitor import RunMonitor
from hybridtrain.cli.telemetry.run_stats import up_to_date
from hybridtrain.cli.validation.checkpoint_checks import check_checkpoint
from hybridtrain.cli.validation.config_checks import check_config
from hybridtrain.cli.validation.host_checks import check_directory, check_machine
from hybridtrain.cli.validation.target_checks import check_targets, made
from hybridtrain.errors import UserError
from hybridtrain.lightning.run_context import strategy_of
from hybridtrain.lightning.step_profiler import StepProfiler
from hybridtrain.report.history import read_history
from hybridtrain.util.files import short
from hybridtrain.worlds.local.cleanup import vanishing_sockets
from hybridtrain.worlds.local.parent_death import bind_loaders


@dataclass(slots=True)
class Parts:
    """What the configuration was made into."""

    module: pl.LightningModule
    data: pl.LightningDataModule | None
    trainer: pl.Trainer
    loggers: list[Logger]
    metrics: dict[str, float] = field(default_factory=dict)


def execute(cfg: DictConfig) -> CommandOutcome:
    """Run ``cfg`` to its end, whatever that is; print the summary, leave ``summary.json``."""
    job_process.adopt()
    bind_loaders()
    hush_lightning()
    began = time.perf_counter()
    overrides = [str(x) for x in HydraConfig.get().overrides.task]
    box: list[Parts] = []

    def body() -> CommandOutcome:
        parts = build(cfg, overrides)
        box.append(parts)
        begin(cfg)
        _train_and_test(cfg, parts)
        return _outcome(cfg, parts)

    def strategy() -> Any:
        return strategy_of(box[0].trainer) if box else None

    with terminating(), no_process_left(), vanishing_sockets():
        outcome = guarded(lambda: mapping_signals(body, strategy), overrides)
    if box:
        ended, wall_s = outcome, time.perf_counter() - began
        outcome = guarded(lambda: _sum_up(cfg, box[0], ended, wall_s), overrides)
    return replace(outcome, directory=short(cfg.run_dir))


def build(cfg: DictConfig, overrides: list[str], drawn_seed: int | None = None) -> Parts:
    """Check the configuration, then instantiate it. Raises UserError.

    ``drawn_seed``: what was drawn where ``seed`` is null, to draw it again.
    """
    check_config(cfg, overrides)
    check_machine(cfg)
    check_directory(Path(cfg.run_dir))
    check_targets(cfg)
    drawn_seed = seed_all(cfg.seed, drawn_seed)
    _try_optimizer(cfg)
    module = made("model", cfg.model, pl.LightningModule)
    data = made("data", cfg.data, pl.LightningDataModule) if cfg.data.get("_target_") else None
    step = 0 if cfg.ckpt is None else check_checkpoint(Path(cfg.ckpt), module, not cfg.test_only)
    loggers = _named("logger", cfg.logger, Logger)
    callbacks = _callbacks(cfg, loggers)
    if cfg.get("resume") is not None:
        go_on(loggers, callbacks, step)
    trainer = _trainer(cfg, callbacks, loggers)
    describe_run(cfg, trainer, drawn_seed)
    return Parts(module, data, trainer, loggers)


def _trainer(cfg: DictConfig, callbacks: list[Callback], loggers: list[Logger]) -> pl.Trainer:
    strategy = made("strategy", cfg.strategy, Strategy)
    parts = {"strategy": strategy, "callbacks": callbacks, "logger": loggers or False}
    trainer: pl.Trainer = made("trainer", cfg.trainer, pl.Trainer, **parts)
    if cfg.profile:
        vars(trainer)["profiler"] = StepProfiler(cfg.run_dir)
    return trainer


def _try_optimizer(cfg: DictConfig) -> None:
    """Let the optimizer judge its options on a parameter nobody needs."""
    if cfg.optimizer.get("_partial_"):
        made("optimizer", cfg.optimizer, object, params=[torch.zeros(1, requires_grad=True)])


def _named(group: str, parts: DictConfig, kind: type) -> list[Any]:
    """The members of a group of named parts; those set to null are left out."""
    given = {str(name): x for name, x in parts.items() if x and x.get("_target_")}
    return [made(f"{group}.{name}", x, kind) for name, x in given.items()]


def _callbacks(cfg: DictConfig, loggers: list[Logger]) -> list[Callback]:
    """The callbacks, without those that the trainer's own switches turn off."""
    found: list[Callback] = _named("callbacks", cfg.callbacks, Callback)
    off: list[type[Callback]] = []
    if cfg.trainer.enable_progress_bar is False or cfg.trainer.barebones:
        off.append(ProgressBar)
    if cfg.trainer.enable_checkpointing is False or cfg.trainer.barebones:
        off.append(Checkpoint)
    if not loggers:
        off.append(LearningRateMonitor)
    for callback in found:
        if isinstance(callback, RunMonitor):
            callback.hparams = _hparams(cfg)
    return [x for x in found if not isinstance(x, tuple(off))]


def _hparams(cfg: DictConfig) -> dict[str, Any]:
    """The configuration as TensorBoard's table of hyper-parameters takes it."""
    content: Any = OmegaConf.to_container(cfg, resolve=True)
    return {k: v for k, v in content.items() if k not in ("callbacks", "logger", "run_dir")}


def _train_and_test(cfg: DictConfig, parts: Parts) -> None:
    """Fit, then test; the metrics of both end in ``parts.metrics``."""
    trainer, module, data = parts.trainer, parts.module, parts.data
    ckpt = cfg.ckpt
    if not cfg.test_only:
        with keeping_whole(trainer):
            trainer.fit(
                module, datamodule=data, ckpt_path=ckpt, weights_only=True if ckpt else None
            )
        parts.metrics |= metrics_of(trainer)
        ckpt = best_checkpoint(trainer)
    if cfg.test_only or (cfg.test and has_test(module, data) and not cfg.trainer.fast_dev_run):
        loggers = [] if unsaved(trainer) else writable(_quiet_csv(parts.loggers))
        parts.metrics |= evaluate(cfg, trainer, Subject(module, data, ckpt), loggers)


def _quiet_csv(loggers: list[Logger]) -> list[Logger]:
    """The loggers for testing: a CSV logger opened a second time would delete what it wrote."""
    return [
        CSVLogger(x.root_dir, name="", version="test") if isinstance(x, CSVLogger) else x
        for x in loggers
    ]


def _outcome(cfg: DictConfig, parts: Parts) -> CommandOutcome:
    metric, lost = _metric(cfg, parts), unsaved(parts.trainer)
    if not lost:
        return CommandOutcome(metric=metric)
    name, reason = next(iter(lost.items()))
    error = f"trained to the end, but {len(lost)} checkpoints are missing, {name} ({reason})"
    return CommandOutcome(exit=FAILED, metric=metric, error=error)


def _metric(cfg: DictConfig, parts: Parts) -> float | None:
    name, metrics = cfg.task.metric, parts.metrics
    untested = not cfg.test and name not in metrics  # as one has wished
    if name is None or cfg.trainer.fast_dev_run or untested:
        return None
    if name in metrics:
        return metrics[name]
    known = f"it logged {', '.join(sorted(metrics)) or 'none'}"
    if is_overridden("validation_step", parts.module) and not has_validated(parts.trainer):
        rank_zero_warn(f"task.metric={name}: there was no validation to log it; {known}")
        return None
    raise UserError(f"task.metric={name}: the run logged no such metric; {known}")


def _sum_up(
    cfg: DictConfig, parts: Parts, outcome: CommandOutcome, wall_s: float
) -> CommandOutcome:
    """Write ``summary.json`` and print the summary, on the first rank only; how it ended then."""
    trainer, directory = parts.trainer, Path(cfg.run_dir)
    if not trainer.is_global_zero:
        return outcome
    result = summary.Summary(
        strategy=str(HydraConfig.get().runtime.choices.get("strategy")),
        workers=trainer.world_size,
        device=_device(trainer),
        wall_s=round(wall_s, 3),
        started=(datetime.now().astimezone() - timedelta(seconds=wall_s)).isoformat(" ", "seconds"),
        checkpoint=_checkpoint(cfg, trainer, outcome),
        exit=outcome.exit,
        error=outcome.error,
    )
    if (stats := up_to_date(summary.left_stats(directory), trainer)) is not None:
        result.take(stats)
    result.metrics, result.unsaved = parts.metrics, unsaved(trainer)
    result.resumed = None if cfg.get("resume") is None else str(cfg.ckpt or "")
    if cfg.ckpt is not None and not cfg.test_only:
        result.total = _total(trainer, directory if result.resumed else None)
    summary.write(result, directory)
    outcome = replace(outcome, exit=result.exit, error=result.error)
    if outcome.exit == BAD_INPUT and not result.updates:
        return outcome  # the line that says what to do is all there is to say
    tensorboard = any(isinstance(x, TensorBoardLogger) for x in parts.loggers)
    return printed("\n".join(summary.lines(result, directory, tensorboard)), outcome)


def _total(trainer: pl.Trainer, directory: Path | None) -> dict[str, int]:
    """Updates and samples with those behind the checkpoint, as far as they are known."""
    rows = {} if directory is None else read_history(directory).columns
    known = {name: round(rows[name][-1]) for name in ("updates", "samples") if rows.get(name)}
    return known or ({"updates": trainer.global_step} if trainer.global_step else {})


def _checkpoint(cfg: DictConfig, trainer: pl.Trainer, outcome: CommandOutcome) -> str | None:
    """The best checkpoint; of a run that was cut short, the newest, to go on from."""
    if cfg.test_only:
        return str(cfg.ckpt)
    best = best_checkpoint(trainer) if outcome.exit == 0 else None
    path = best or newest([Path(cfg.run_dir) / "checkpoints"])
    return None if path is None else str(path)


def _device(trainer: pl.Trainer) -> str:
    if type(trainer.accelerator).__name__ != "CUDAAccelerator":
        return "cpu"
    return torch.cuda.get_device_name(0)
