"""One run: build module, data and trainer from the configuration, train, test, summarise."""

from __future__ import annotations

import hashlib
import logging
import math
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from hydra.core.hydra_config import HydraConfig
from lightning_utilities.core.rank_zero import rank_zero_warn
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import (
    Callback,
    Checkpoint,
    LearningRateMonitor,
    ProgressBar,
)
from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger
from pytorch_lightning.loggers.csv_logs import ExperimentWriter
from pytorch_lightning.strategies import Strategy
from pytorch_lightning.utilities.exceptions import SIGTERMException
from pytorch_lightning.utilities.model_helpers import is_overridden

from hybridtrain.cli.claim import check_kept, started_by_a_run
from hybridtrain.cli.config_values import overrides_of, portable
from hybridtrain.cli.exit_status import (
    BAD_INPUT,
    FAILED,
    CommandOutcome,
    guarded,
    interrupted,
    printed,
)
from hybridtrain.cli.explain import naming_keys
from hybridtrain.cli.former_run import newest_in, sign
from hybridtrain.cli.further_host import place_in, quiet
from hybridtrain.cli.quiet import hush_lightning
from hybridtrain.cli.sweep import job_process, reports
from hybridtrain.cli.telemetry import summary
from hybridtrain.cli.telemetry.monitor import STATS_FILE, RunMonitor, RunStats, up_to_date
from hybridtrain.cli.telemetry.summary import best_checkpoint, has_validated, logged, metrics_of
from hybridtrain.cli.validation.checkpoint_checks import check_checkpoint
from hybridtrain.cli.validation.config_checks import check_config
from hybridtrain.cli.validation.host_checks import check_directory, check_machine, refusal_of
from hybridtrain.cli.validation.target_checks import check_targets, made
from hybridtrain.engine.monitoring.watchdog import to_stderr
from hybridtrain.engine.scheme import usable_cores
from hybridtrain.engine.worlds.parent_death import bind_loaders
from hybridtrain.engine.worlds.signals import ending_signals, restore
from hybridtrain.errors import UserError
from hybridtrain.lightning.checkpointing.checkpoint_writing import CheckpointWriting
from hybridtrain.lightning.hooks.trainer_hooks import ScriptLauncher, purge_from
from hybridtrain.lightning.hosts.agreement import compare_configuration
from hybridtrain.lightning.hosts.cluster import be_silent_beyond_host_0
from hybridtrain.lightning.preflight.strategy_checks import check_free_running
from hybridtrain.lightning.run_context import strategy_of
from hybridtrain.lightning.states.logger_state import Row, change_rows, enable_writing, keep_rows
from hybridtrain.lightning.step_profiler import StepProfiler
from hybridtrain.lightning_package import told_to_children
from hybridtrain.report.runs import RESUMED_FROM, SUMMARY_FILE
from hybridtrain.util.cleanup import vanishing_sockets
from hybridtrain.util.files import open_input, short
from hybridtrain.util.host_place import HostPlace
from hybridtrain.virtual.advice import advise

log = logging.getLogger(__name__)

# ---- a run's directory --------------------------------------------------------------------------
# A run's directory: prepared at the start, its checkpoints written whole, its logs continued.


def begin(cfg: DictConfig) -> None:
    """Sign the directory, and remove the summary and the counts of an earlier run in it."""
    if started_by_a_run():
        return
    directory = Path(cfg.run_dir)
    try:
        sign(directory, goes_on=bool(cfg.get("resume") or cfg.get("test_only")))
        for name in (SUMMARY_FILE, STATS_FILE):  # after `kill -9` both may be there
            (directory / name).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"the run directory {directory} cannot be written ({error.strerror}); choose another "
            "with hydra.run.dir=DIR"
        ) from None
    if cfg.ckpt is not None and not cfg.test_only and cfg.strategy.get("record") is not None:
        _keep(Path(cfg.ckpt).resolve(), directory.resolve())


def _keep(checkpoint: Path, directory: Path) -> None:
    """Keep for a replay the checkpoint to resume from, if the run may overwrite or delete it."""
    kept = directory / RESUMED_FROM
    if directory not in checkpoint.parents or (kept.exists() and kept.samefile(checkpoint)):
        return
    try:
        kept.unlink(missing_ok=True)
        try:
            kept.hardlink_to(checkpoint)
        except OSError:  # a file system without hard links
            shutil.copyfile(checkpoint, kept)
    except OSError as error:
        to_stderr(f"{kept}: not written ({error.strerror}); no replay without {checkpoint}")


@contextmanager
def keeping_whole(trainer: Trainer) -> Iterator[None]:
    """Let Lightning's own strategies write checkpoints whole, as ours do."""
    strategy: Any = strategy_of(trainer)
    if hasattr(strategy, "keeping"):
        yield
        return
    strategy.keeping = keeping = CheckpointWriting("blocking")
    with keeping.listening(trainer):
        keeping.write_whole(trainer)
        yield
    keeping.forget_lost(trainer)


def writable(loggers: Sequence[Logger]) -> list[Logger]:
    """The loggers whose directory can still be written; the others are named on standard error."""
    found = []
    for logger in loggers:
        place = getattr(logger, "log_dir", None) or logger.save_dir
        refusal = None if place is None else refusal_of(Path(place))
        if refusal is None:
            found.append(logger)
        else:
            to_stderr(f"{type(logger).__name__}: no log of the test ({refusal.strerror})")
    return found


def unsaved(trainer: Trainer) -> dict[str, str]:
    """Checkpoints that could not be written -> reason."""
    keeping = getattr(strategy_of(trainer), "keeping", None)
    return {} if keeping is None else dict(keeping.unsaved.lost)


def continue_logs(loggers: Sequence[Logger], callbacks: Sequence[Callback], row: int) -> None:
    """Resume logs and monitor: remove rows logged after the checkpoint, which will be logged again.

    Lightning's ``CSVLogger`` would delete the whole file.

    Args:
        row: number of the first row that is logged again.
    """
    for callback in callbacks:
        if isinstance(callback, RunMonitor):
            callback.resume()
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            purge_from(logger, row)  # hides what is logged again
        elif type(logger) is CSVLogger:
            _cut(Path(logger.log_dir) / ExperimentWriter.NAME_METRICS_FILE, row)
            keep_rows(logger, again=row - 1)


def _cut(path: Path, step: int) -> None:
    """Keep the rows with steps 0 to ``step`` - 1."""

    def kept(row: Row) -> Row | None:
        at = row.get("step") or ""
        return row if at.isdecimal() and int(at) < step else None

    change_rows(path, kept)


# ---- end a command: exit status after a signal, and no process left running ---------------------


def mapping_signals(
    body: Callable[[], CommandOutcome], strategy: Callable[[], Any]
) -> CommandOutcome:
    """Run ``body``; after a signal return 128 + its number, where Lightning exits with 1.

    Args:
        strategy: returns the trainer's strategy, if there is one; it may know the signal.
    """
    try:
        return body()
    except SIGTERMException:
        return interrupted(signal.SIGTERM)
    except SystemExit as stop:
        known = getattr(strategy(), "interrupted_by", None)
        if known is not None:
            return interrupted(int(known))
        if isinstance(stop.__context__, KeyboardInterrupt):
            return interrupted(signal.SIGINT)
        raise


@contextmanager
def terminating() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exception, so that callbacks save and children stop."""

    def stop(signum: int, _: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    try:
        before = {s: signal.signal(s, stop) for s in ending_signals() if s != signal.SIGINT}
    except ValueError:  # not in the main thread
        yield
        return
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        restore({**before, signal.SIGINT: interrupt})  # Lightning ignores it after the first


@contextmanager
def no_process_left() -> Iterator[None]:
    """Kill child processes that an interrupted strategy leaves (Lightning's forked DDP does)."""
    before = {x.pid for x in multiprocessing.active_children()}
    try:
        yield
    finally:
        left = [x for x in multiprocessing.active_children() if x.pid not in before]
        for child in left:
            child.join(timeout=2.0)
            child.kill()
            child.join()


def _workers_cpu_s() -> float:
    """Processor time of the child processes that have ended."""
    return os.times().children_user + os.times().children_system


@dataclass(slots=True)
class Parts:
    """The configuration, the objects built from it, and the run's metrics."""

    cfg: DictConfig
    module: pl.LightningModule
    data: pl.LightningDataModule | None
    trainer: pl.Trainer
    loggers: list[Logger]
    reporter: reports.Reporter | None = None
    pruned: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    cpu_before_s: float = field(default_factory=_workers_cpu_s)


def execute(cfg: DictConfig) -> CommandOutcome:
    """Run ``cfg``; however it ends, print the summary and write ``summary.json``."""
    job_process.adopt()
    bind_loaders()
    hush_lightning()
    began = time.perf_counter()
    overrides = overrides_of(HydraConfig.get())
    box: list[Parts] = []

    def body() -> CommandOutcome:
        place = place_in(cfg)
        be_silent_beyond_host_0(place)
        with quiet(place):
            parts = build(cfg, overrides)
            box.append(parts)
            begin(cfg)
            if place.host > 0:
                _train_beyond_host_0(cfg, parts, place)
                return CommandOutcome()
        _train_and_test(cfg, parts)
        return _outcome(cfg, parts)

    def strategy() -> Any:
        return strategy_of(box[0].trainer) if box else None

    with terminating(), no_process_left(), vanishing_sockets(), told_to_children():
        outcome = guarded(lambda: mapping_signals(body, strategy), overrides)
    if box and place_in(cfg).host == 0:
        ended, wall_s = outcome, time.perf_counter() - began
        outcome = guarded(lambda: _sum_up(cfg, box[0], ended, wall_s), overrides)
    return replace(outcome, directory=short(cfg.run_dir))


def build(cfg: DictConfig, overrides: list[str], drawn_seed: int | None = None) -> Parts:
    """Check the configuration, then instantiate it. Raises UserError.

    ``drawn_seed``: in a replay, the seed that the run drew because ``seed`` was null.
    """
    check_config(cfg, overrides)
    check_machine(cfg)
    check_directory(Path(cfg.run_dir))
    check_targets(cfg)
    compare_configuration(OmegaConf.to_container(cfg, resolve=False))  # type: ignore[arg-type]
    drawn_seed = seed_all(cfg.seed, drawn_seed)
    _try_optimizer(cfg)
    module = made("model", cfg.model, pl.LightningModule)
    data = made("data", cfg.data, pl.LightningDataModule) if cfg.data.get("_target_") else None
    given = None if place_in(cfg).host else cfg.ckpt  # of host 0, for all
    row = 0 if given is None else check_checkpoint(Path(given), module, not cfg.test_only)
    loggers = _named("logger", cfg.logger, Logger)
    callbacks = _callbacks(cfg, loggers)
    reporter = reports.reporter(cfg.task)
    callbacks += [] if reporter is None else [reporter]
    if cfg.get("resume") is not None:
        continue_logs(loggers, callbacks, row)
    trainer = _trainer(cfg, callbacks, loggers)
    describe_run(cfg, trainer, drawn_seed)
    return Parts(cfg, module, data, trainer, loggers, reporter)


def _trainer(cfg: DictConfig, callbacks: list[Callback], loggers: list[Logger]) -> pl.Trainer:
    strategy = made("strategy", cfg.strategy, Strategy)
    parts = {"strategy": strategy, "callbacks": callbacks, "logger": loggers or False}
    trainer: pl.Trainer = made("trainer", cfg.trainer, pl.Trainer, **parts)
    if cfg.profile:
        vars(trainer)["profiler"] = StepProfiler(cfg.run_dir)
    return trainer


def _try_optimizer(cfg: DictConfig) -> None:
    """Let the optimizer check its options, on a dummy parameter."""
    if cfg.optimizer.get("_partial_"):
        made("optimizer", cfg.optimizer, object, params=[torch.zeros(1, requires_grad=True)])


def _named(group: str, parts: DictConfig, kind: type) -> list[Any]:
    """Instantiate the named members of a group, except those set to null."""
    given = {str(name): x for name, x in parts.items() if x and x.get("_target_")}
    return [made(f"{group}.{name}", x, kind) for name, x in given.items()]


def _callbacks(cfg: DictConfig, loggers: list[Logger]) -> list[Callback]:
    """The callbacks, without those that options of the trainer turn off."""
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
            callback.describe(_hparams(cfg))
    return [x for x in found if not isinstance(x, tuple(off))]


def _hparams(cfg: DictConfig) -> dict[str, Any]:
    """The configuration to log as hyper-parameters."""
    content: Any = OmegaConf.to_container(cfg, resolve=True)
    return {k: v for k, v in content.items() if k not in ("callbacks", "logger", "run_dir")}


def _train_and_test(cfg: DictConfig, parts: Parts) -> None:
    """Fit, then test; collect the metrics of both in ``parts.metrics``."""
    trainer, module, data = parts.trainer, parts.module, parts.data
    ckpt = cfg.ckpt
    if not cfg.test_only:
        with keeping_whole(trainer), naming_keys(cfg):
            _fit(cfg, parts)
        check_kept(Path(cfg.run_dir))
        parts.metrics |= metrics_of(trainer)
        parts.pruned = parts.reporter is not None and parts.reporter.was_pruned()
        if parts.pruned:
            return
        ckpt = best_checkpoint(trainer)
    if cfg.test_only or (cfg.test and has_test(module, data) and not cfg.trainer.fast_dev_run):
        loggers = [] if unsaved(trainer) else writable(_quiet_csv(parts.loggers))
        evaluate(cfg, parts, ckpt, loggers)


def _fit(cfg: DictConfig, parts: Parts) -> None:
    weights_only = True if cfg.ckpt else None
    parts.trainer.fit(
        parts.module, datamodule=parts.data, ckpt_path=cfg.ckpt, weights_only=weights_only
    )


def _train_beyond_host_0(cfg: DictConfig, parts: Parts, place: HostPlace) -> None:
    """Train with this host's workers; host 0 tests, and writes all there is to write."""
    if cfg.test_only:
        return
    n_workers = parts.trainer.num_devices * cfg.strategy.workers_per_device
    to_stderr(
        f"host {place.host} of {place.n_hosts}: {n_workers} worker{'s' * (n_workers > 1)}, relay "
        f"to {place.address}"
    )
    _fit(cfg, parts)


def _quiet_csv(loggers: list[Logger]) -> list[Logger]:
    """The loggers for testing; a CSV logger opened a second time would delete its file."""
    return [
        CSVLogger(x.root_dir, name="", version="test") if isinstance(x, CSVLogger) else x
        for x in loggers
    ]


def _outcome(cfg: DictConfig, parts: Parts) -> CommandOutcome:
    check_kept(Path(cfg.run_dir))
    metric, lost = _metric(cfg, parts), unsaved(parts.trainer)
    if not lost:
        return CommandOutcome(metric=metric)
    name, reason = next(iter(lost.items()))
    error = f"trained to the end, but {len(lost)} checkpoints are missing, {name} ({reason})"
    return CommandOutcome(exit=FAILED, metric=metric, error=error)


def _metric(cfg: DictConfig, parts: Parts) -> float | None:
    name, metrics = cfg.task.metric, parts.metrics
    untested = (not cfg.test or parts.pruned) and name not in metrics
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
    """Write ``summary.json`` and print the summary on rank 0; returns the outcome."""
    trainer, directory = parts.trainer, Path(cfg.run_dir)
    if not trainer.is_global_zero:
        return outcome
    stats = up_to_date(summary.left_stats(directory), trainer) or RunStats()
    result = summary.Summary(
        **{**vars(stats), "workers": trainer.world_size},
        strategy=summary.strategy_of(cfg.strategy, HydraConfig.get().runtime.choices),
        device=_device(trainer),
        wall_s=round(wall_s, 3),
        started=(datetime.now().astimezone() - timedelta(seconds=wall_s)).isoformat(" ", "seconds"),
        cores=usable_cores(),
        cpu_s=_workers_cpu_s() - parts.cpu_before_s,
        checkpoint=_checkpoint(cfg, trainer, outcome),
        exit=outcome.exit,
        error=outcome.error,
        advice=None if outcome.exit else _advice(cfg, parts),
        metrics=parts.metrics,
        unsaved=unsaved(trainer),
        resumed=None if cfg.get("resume") is None else str(cfg.ckpt or ""),
    )
    summary.write(result, directory)
    outcome = replace(outcome, exit=result.exit, error=result.error)
    if outcome.exit == BAD_INPUT and not result.updates:
        return outcome  # the error's line is enough
    tensorboard = any(isinstance(x, TensorBoardLogger) for x in parts.loggers)
    return printed("\n".join(summary.lines(result, directory, tensorboard)), outcome)


def _advice(cfg: DictConfig, parts: Parts) -> dict[str, Any] | None:
    """Another strategy under which this run would have been faster; it never harms the run."""
    record, trainer = cfg.strategy.get("record"), parts.trainer
    if not cfg.advice or record is None or cfg.test_only:
        return None
    try:
        if _device(trainer) != "cpu" and cfg.strategy.workers_per_device > 1:
            return None  # more busy workers would take more time on the device that they share
        check_free_running(trainer)
        strategy: Any = strategy_of(trainer)
        stats, cpu_s = strategy.run_stats(), _workers_cpu_s() - parts.cpu_before_s
        most_per_s = usable_cores() * stats["samples"] / cpu_s if cpu_s else math.inf
        by_hand = not trainer.lightning_module.automatic_optimization
        found = advise(Path(record), stats, most_per_s, by_hand)
        return None if found is None else asdict(found)
    except Exception:
        log.debug("no advice", exc_info=True)
        return None


def _checkpoint(cfg: DictConfig, trainer: pl.Trainer, outcome: CommandOutcome) -> str | None:
    """The best checkpoint; of a run that did not finish, the newest, to resume from."""
    if cfg.test_only:
        return str(cfg.ckpt)
    best = best_checkpoint(trainer) if outcome.exit == 0 else None
    path = best or newest_in(Path(cfg.run_dir))
    return None if path is None else str(path)


def _device(trainer: pl.Trainer) -> str:
    if type(trainer.accelerator).__name__ != "CUDAAccelerator":
        return "cpu"
    return torch.cuda.get_device_name(0)


# ---- test ---------------------------------------------------------------------------------------

# The trainer's options that matter to a test.
_SHARED = ("precision", "limit_test_batches", "deterministic", "benchmark", "inference_mode")


def has_test(module: pl.LightningModule, data: pl.LightningDataModule | None) -> bool:
    """Whether the module has a test step, and it or the data a test dataloader."""
    source = module if data is None else data
    return is_overridden("test_step", module) and is_overridden("test_dataloader", source)


def evaluate(cfg: DictConfig, parts: Parts, ckpt: str | None, loggers: list[Logger]) -> None:
    """Test the module with the weights of ``ckpt``; None: as they are.

    A distributed sampler repeats samples to equalise the ranks' shares, and the mean of metrics
    over unequal shares is not that of the whole. So the test runs on one device, in the process
    that started the training. Only where each rank is a program of its own (Lightning's ``popen``)
    do all ranks take part.

    Raises:
        UserError: if the task has no test.
    """
    if not has_test(parts.module, parts.data):
        raise UserError(f"task {cfg.task.name!r} has no test set; leave test_only=true away")
    trainer = parts.trainer
    launcher = strategy_of(trainer).launcher
    if not isinstance(launcher, ScriptLauncher) or trainer.world_size == 1:
        trainer = _single(cfg, trainer, loggers)
    trainer.test(
        parts.module,
        datamodule=parts.data,
        ckpt_path=ckpt,
        verbose=False,
        weights_only=True if cfg.test_only else None,
    )
    parts.metrics |= logged(trainer)


def _single(cfg: DictConfig, trainer: pl.Trainer, loggers: list[Logger]) -> pl.Trainer:
    enable_writing(loggers)
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


# ---- seed and record ----------------------------------------------------------------------------


def seed_all(seed: int | None, drawn: int | None = None) -> int | None:
    """Seed the random number generators.

    Without a ``seed``, use ``drawn``, or draw one, and return it. That one is for this process
    only, so it is in no environment variable.
    """
    if seed is not None:
        pl.seed_everything(seed, workers=True, verbose=False)
        return None
    drawn = random.SystemRandom().getrandbits(32) if drawn is None else drawn
    random.seed(drawn)
    np.random.seed(drawn)
    torch.manual_seed(drawn)
    return drawn


def describe_run(cfg: DictConfig, trainer: pl.Trainer, drawn_seed: int | None) -> None:
    """Add configuration, seed and directories to the header of the run's record, if any."""
    recording = getattr(strategy_of(trainer), "recording", None)
    if recording is not None:
        run_dir = Path(cfg.run_dir).absolute()
        about: dict[str, Any] = {"config": portable(cfg), "drawn_seed": drawn_seed}
        kept = sorted(str(path.relative_to(run_dir)) for path in run_dir.rglob("*.ckpt"))
        about |= {"checkpoints": kept, "directory": str(Path.cwd()), "run_dir": str(run_dir)}
        if cfg.ckpt is not None:
            about["ckpt"] = hash_of_checkpoint(Path(cfg.ckpt))
        recording.describe(about)


def hash_of_checkpoint(path: Path) -> str:
    """Hash of the file's content; empty if there is no file."""
    try:
        with open_input(path, "the checkpoint") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except UserError:
        return ""
