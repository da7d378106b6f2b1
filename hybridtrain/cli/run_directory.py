"""A run's directory: prepared at the start, its checkpoints written whole, its logs continued."""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger
from pytorch_lightning.loggers.csv_logs import ExperimentWriter

from hybridtrain.cli.claim import started_by_a_run
from hybridtrain.cli.resume import sign
from hybridtrain.cli.telemetry.monitor import RunMonitor
from hybridtrain.cli.validation.host_checks import refusal_of
from hybridtrain.errors import UserError
from hybridtrain.lightning.checkpointing.checkpoint_writing import CheckpointWriting
from hybridtrain.lightning.hooks.callback_hooks import purge_from
from hybridtrain.lightning.results.logger_state import keep_rows
from hybridtrain.lightning.run_context import strategy_of
from hybridtrain.monitoring.watchdog import to_stderr
from hybridtrain.report.runs import RESUMED_FROM, SUMMARY_FILE
from hybridtrain.util.files import write_whole
from hybridtrain.util.input_files import read_text


def begin(cfg: DictConfig) -> None:
    """Sign the directory, and remove the summary of an earlier run in it."""
    if started_by_a_run():
        return
    directory = Path(cfg.run_dir)
    try:
        sign(directory)
        (directory / SUMMARY_FILE).unlink(missing_ok=True)
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
        keeping.take_over(trainer, changes=False)
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


def continue_logs(loggers: Sequence[Logger], callbacks: Sequence[Callback], step: int) -> None:
    """Resume logs and monitor: remove rows logged after the checkpoint, which will be logged again.

    Lightning's ``CSVLogger`` would delete the whole file.

    Args:
        step: ``global_step`` of the checkpoint.
    """
    for callback in callbacks:
        if isinstance(callback, RunMonitor):
            callback.resumes = True
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            purge_from(logger, step)  # hides what is logged again
        elif type(logger) is CSVLogger:
            _cut(Path(logger.log_dir) / ExperimentWriter.NAME_METRICS_FILE, step)
            keep_rows(logger)


def _cut(path: Path, step: int) -> None:
    """Keep the rows with steps 0 to ``step`` - 1."""
    try:
        lines = io.StringIO(read_text(path, "the log", errors="replace"), newline="")
        reader = csv.DictReader(lines)
        rows, names = list(reader), reader.fieldnames or []
    except (UserError, csv.Error):
        return
    kept = [row for row in rows if (row.get("step") or "").isdigit() and int(row["step"]) < step]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(kept)
    write_whole(path, text.getvalue().encode())
