"""State of loggers, sent to workers and back, so that what they have written stays.

On one device a logger lives through ``fit``, ``test`` and ``fit`` again, with the rows it has not
written yet, the columns it knows, and whatever a user's own keeps in memory. Here each of these
runs has a worker 0 of its own, so all that is plain data comes home with it. A ``CSVLogger``
deletes what it finds where it is opened: it is opened in the calling process, once, before workers
have it. One that is found again after a failure learns from the file what was written meanwhile.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_fabric.loggers.csv_logs import CSVLogger
from lightning_fabric.loggers.tensorboard import TensorBoardLogger
from lightning_utilities.core.rank_zero import rank_zero_only
from pytorch_lightning.loggers import Logger
from pytorch_lightning.loggers.csv_logs import ExperimentWriter

from hybridtrain.lightning.hooks.callback_hooks import WRITER, set_writer, writer_of
from hybridtrain.lightning.results.callback_state import give_plain, plain_attributes


def logger_states(trainer: Any) -> list[dict[str, Any]]:
    """What a logger would be after pickling, for workers that are forked instead.

    A fork has none of the threads behind ``logger.experiment``, and one that the user has opened
    already would hang when its queue is full. As after pickling, it is opened anew, or (Weights &
    Biases) the workers join the one of this process.
    """
    states = [logger.__getstate__() for logger in trainer.loggers]
    return [state if isinstance(state, dict) else {} for state in states]


@contextmanager
def logs_open(trainer: Any) -> Iterator[None]:
    """In the calling process, around a run: loggers that write files know where."""
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            _ = logger.version  # or a run after one that has failed would have another
        elif isinstance(logger, CSVLogger):
            logger.save()  # what is not written yet, or both sides would write it
    try:
        yield
    except BaseException:  # nothing comes home
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger):
                keep_rows(logger)
        raise


def identity(logger: Logger) -> dict[str, Any]:
    """What a logger has become: its version, the number of its run, its names."""
    known = vars(logger).items()
    return {k: v for k, v in known if isinstance(v, str | int | float | None) and k != WRITER}


def of_logger(logger: Any) -> dict[str, dict[str, Any]]:
    """What goes home from worker 0: plain data, of the writer of a CSV file as well."""
    own = plain_attributes(logger, lambda name: name != WRITER)
    writer = writer_of(logger) if isinstance(logger, CSVLogger) else None
    return {"own": own, "writer": {} if writer is None else plain_attributes(writer)}


def give_to_logger(logger: Any, brought: dict[str, dict[str, Any]]) -> None:
    """In the calling process."""
    give_plain(logger, brought["own"])
    writer = writer_of(logger)
    if writer is not None and brought["writer"]:
        give_plain(writer, brought["writer"])


class _Reopened(ExperimentWriter):
    """Goes on with the file of another process, which may be writing to it still."""

    def _check_log_dir_exists(self) -> None:
        """What is there stays; Lightning's would delete it."""

    def save(self) -> None:
        """Add the rows; the other one may have added columns."""
        self.metrics_keys = _columns(Path(self.metrics_file_path)) or self.metrics_keys
        super().save()


def _columns(path: Path) -> list[str]:
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return next(csv.reader(file), [])


def keep_rows(logger: CSVLogger) -> None:
    """Go on with the rows and columns that another process has written."""
    if rank_zero_only.rank != 0:  # type: ignore[attr-defined]
        return
    writer = writer_of(logger)
    if writer is None:
        set_writer(logger, _Reopened(logger.log_dir))
    elif type(writer) is ExperimentWriter:
        writer.__class__ = _Reopened
