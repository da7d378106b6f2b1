"""Send the state of loggers to workers and back; keep training when the disk refuses a log.

On one device a logger lives through ``fit``, ``test`` and ``fit`` again, with its unwritten rows,
its columns, and a user's own attributes. Here each call has a worker 0 of its own, so a logger's
plain attributes are sent back after each. A ``CSVLogger`` deletes existing files when it opens: the
calling process opens it, once, before workers get it. After a failure it reads columns from the
file.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_fabric.loggers.csv_logs import CSVLogger
from lightning_fabric.loggers.tensorboard import TensorBoardLogger
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn
from pytorch_lightning.loggers import Logger
from pytorch_lightning.loggers.csv_logs import ExperimentWriter

from hybridtrain.errors import UserError
from hybridtrain.lightning.hooks.points import Point, around
from hybridtrain.lightning.hooks.trainer_hooks import WRITER, set_writer, writer_of
from hybridtrain.lightning.states.held_objects import HeldObjects, set_attributes
from hybridtrain.lightning.states.plain_data import Refer, attributes_of, nothing_held
from hybridtrain.util.files import read_text, write_whole

Row = dict[str, Any]
_OF_EVERY_ROW = {"step", "epoch"}


def logger_states(trainer: Any) -> list[dict[str, Any]]:
    """Each logger's pickled state, for forked workers.

    A fork loses the threads of an opened ``logger.experiment``, which would hang with a full queue.
    With the pickled state it is opened anew, or (Weights & Biases) joins that of this process.
    """
    states = [logger.__getstate__() for logger in trainer.loggers]
    return [state if isinstance(state, dict) else {} for state in states]


@contextmanager
def logs_open(trainer: Any) -> Iterator[None]:
    """In the calling process, around a run: fix the places of loggers that write files."""
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            _ = logger.version  # or a run after a failed one would choose another
        elif isinstance(logger, CSVLogger):
            logger.save()  # or both processes would write the buffered rows
    try:
        yield
    except BaseException:  # workers send nothing back
        for logger in trainer.loggers:
            keep_rows(logger)
        raise


def identity(logger: Logger) -> dict[str, Any]:
    """A logger's version, run number and names."""
    known = vars(logger).items()
    return {k: v for k, v in known if isinstance(v, str | int | float | None) and k != WRITER}


def of_logger(logger: Any, refer: Refer = nothing_held) -> dict[str, dict[str, Any]]:
    """In worker 0: the plain attributes of a logger, and of a CSV logger's writer."""
    own = attributes_of(((k, v) for k, v in vars(logger).items() if k != WRITER), refer)
    writer = writer_of(logger) if isinstance(logger, CSVLogger) else None
    return {"own": own, "writer": {} if writer is None else attributes_of(vars(writer).items())}


def give_to_logger(
    logger: Any, brought: dict[str, dict[str, Any]], held: HeldObjects | None = None
) -> None:
    """In the calling process."""
    set_attributes(logger, brought["own"], held)
    writer = writer_of(logger)
    if writer is not None and brought["writer"]:
        set_attributes(writer, brought["writer"], None)


class _Reopened(ExperimentWriter):
    """Appends to the file of another process, which may still write to it."""

    _again = -1

    def expect_again(self, step: int) -> None:
        """Let the rows of this step, a validation or the end of an epoch, replace the file's."""
        self._again = step

    def _check_log_dir_exists(self) -> None:
        """Keep existing files, which Lightning would delete."""

    def save(self) -> None:
        """Append the rows, with columns that the other process may have added."""
        for row in self.metrics:
            if row["step"] == self._again:
                _forget(Path(self.metrics_file_path), self._again, row.keys())
        self.metrics_keys = _columns(Path(self.metrics_file_path)) or self.metrics_keys
        super().save()


def _forget(path: Path, step: int, names: Iterable[str]) -> None:
    """Remove what the file has of these metrics at the step."""
    gone = set(names) - _OF_EVERY_ROW

    def left(row: Row) -> Row | None:
        if row.get("step") != str(step) or not any(row.get(name) for name in gone):
            return row
        rest = {name: "" if name in gone else value for name, value in row.items()}
        return rest if any(rest[name] for name in rest.keys() - _OF_EVERY_ROW) else None

    change_rows(path, left)


def change_rows(path: Path, changed: Callable[[Row], Row | None]) -> None:
    """Write the rows of a log again as ``changed`` gives them; ``None``: without that row.

    A log that is missing or cannot be read stays as it is.
    """
    try:
        lines = io.StringIO(read_text(path, "the log", errors="replace"), newline="")
        reader = csv.DictReader(lines)
        rows, names = list(reader), reader.fieldnames or []
    except (UserError, csv.Error):
        return
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(row for row in map(changed, rows) if row is not None)
    write_whole(path, text.getvalue().encode())


def _columns(path: Path) -> list[str]:
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        return next(csv.reader(file), [])


def keep_rows(logger: Logger, again: int = -1) -> None:
    """Let a logger of rows append to the rows and columns that another process has written.

    ``again``: a step of which rows may be logged again, in place of those.
    """
    if rank_zero_only.rank != 0 or not isinstance(logger, CSVLogger):  # type: ignore[attr-defined]
        return
    writer = writer_of(logger)
    if writer is None:
        writer = _Reopened(logger.log_dir)
        set_writer(logger, writer)
    elif type(writer) is ExperimentWriter:
        writer.__class__ = _Reopened
    if isinstance(writer, _Reopened) and again >= 0:
        writer.expect_again(again)


# ---- a full disk --------------------------------------------------------------------------------


@dataclass
class Patience:
    """Lets one logger's methods fail by a refusing disk, with one warning."""

    name: str
    warned: bool = False

    def write(self, proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A method of the logger."""
        try:
            return proceed(*args, **kwargs)
        except Exception as error:
            refusal = _refusal(error)
            if refusal is None:
                raise
            if not self.warned:
                rank_zero_warn(
                    f"{self.name} could not write its log ({refusal.strerror or refusal}); "
                    "training goes on, the log has gaps"
                )
            self.warned = True


def _refusal(error: BaseException | None) -> OSError | None:
    """The ``OSError`` behind it: TensorBoardLogger raises it as a value that cannot be logged."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return error


def enable_writing(loggers: list[Logger]) -> None:
    """Let training continue where the disk refuses what these write."""
    for logger in loggers:
        around(Point.LOG, logger, Patience(type(logger).__name__).write)
