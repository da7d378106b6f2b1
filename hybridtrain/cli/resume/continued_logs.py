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

from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger
from pytorch_lightning.loggers.csv_logs import ExperimentWriter

from hybridtrain.cli.telemetry.monitor import RunMonitor
from hybridtrain.lightning.hooks.callback_hooks import purge_from
from hybridtrain.lightning.results.logger_state import keep_rows
from hybridtrain.util.files import write_whole


def go_on(loggers: Sequence[Logger], callbacks: Sequence[Callback], step: int) -> None:
    """Let loggers append, and tell the monitor.

    Args:
        step: updates that the checkpoint has behind it.
    """
    for callback in callbacks:
        if isinstance(callback, RunMonitor):
            callback.goes_on_at = step
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            purge_from(logger, step)  # hides what is logged again
        elif type(logger) is CSVLogger:
            _cut(Path(logger.log_dir) / ExperimentWriter.NAME_METRICS_FILE, step)
            keep_rows(logger)


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
