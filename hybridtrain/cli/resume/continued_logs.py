"""Logs of a run that goes on: appended to, without what was logged after its checkpoint.

A run that was killed had trained and logged beyond the checkpoint from which it goes on. These
steps are done again, so their rows are taken away first, and the files end as if nothing had
happened. Lightning's ``CSVLogger`` would delete what is there.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_fabric.loggers.logger import rank_zero_experiment
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger
from pytorch_lightning.loggers.csv_logs import ExperimentWriter

from hybridtrain.cli.telemetry.monitor import RunMonitor
from hybridtrain.util.files import write_whole


def go_on(loggers: Sequence[Logger], callbacks: Sequence[Callback], step: int) -> list[Logger]:
    """The loggers that append; the monitor is told.

    Args:
        step: updates that the checkpoint has behind it.
    """
    for callback in callbacks:
        if isinstance(callback, RunMonitor):
            callback.goes_on_at = step
    return [_appending(each, step) for each in loggers]


def _appending(logger: Logger, step: int) -> Logger:
    match logger:
        case TensorBoardLogger():
            logger._kwargs.setdefault("purge_step", step)  # hides what is logged again
        case CSVLogger() if type(logger) is CSVLogger:
            _cut(Path(logger.log_dir) / ExperimentWriter.NAME_METRICS_FILE, step)
            places = (logger.save_dir, logger.name, logger.version, logger._prefix)
            return AppendingCSVLogger(*places, logger._flush_logs_every_n_steps)
    return logger


def _cut(path: Path, step: int) -> None:
    """Leave the rows of the first ``step`` mini-batches, which have the steps from 0."""
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            rows, names = list(reader), reader.fieldnames or []
    except OSError:
        return
    kept = [row for row in rows if (row.get("step") or "").isdigit() and int(row["step"]) < step]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(kept)
    write_whole(path, text.getvalue().encode())


class AppendingCSVLogger(CSVLogger):
    """Goes on with the file that is there."""

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The writer."""
        if self._experiment is None:
            Path(self.log_dir).mkdir(parents=True, exist_ok=True)
            self._experiment = _AppendingWriter(self.log_dir)
        return self._experiment


class _AppendingWriter(ExperimentWriter):
    def _check_log_dir_exists(self) -> None:
        """Instead of deleting the file, learn its columns."""
        try:
            with Path(self.metrics_file_path).open(newline="") as file:
                self.metrics_keys = next(csv.reader(file), [])
        except OSError:
            pass
