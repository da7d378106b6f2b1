"""Checkpoints written while training goes on.

Everything that has to be of one moment happens at that moment: the checkpoint is made into the
bytes of its file, by ``torch.save``, before anybody trains on. A thread only brings these bytes to
the disk. So the file is the one that would have been written while all wait, to the bit, and what
cannot be saved is said at once. Files appear whole: written beside, brought to the disk, renamed.
What a callback deletes is deleted after what replaces it is there.

Only the files of ``ModelCheckpoint`` are waited for later: at the end of training, when one is read
or its name is looked for, and when a third would have to be kept in memory. Whoever calls
``trainer.save_checkpoint`` finds the file when it returns.
"""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import Logger, TensorBoardLogger

from hybridtrain.errors import UserError

CHOICES = ("blocking", "background")
_MOST = 2  # checkpoints in memory


def choice(value: str) -> str:
    """How checkpoints are to be written.

    Raises:
        UserError: if there is no such way.
    """
    if value not in CHOICES:
        raise UserError(f"checkpoint={value!r} was given; it must be {' or '.join(CHOICES)}")
    return value


class BackgroundCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints to local files in a thread, in order; others as Lightning does."""

    def __init__(self) -> None:
        self.defers = False  # whether saving returns before the file is there
        self._thread: ThreadPoolExecutor | None = None
        self._pending: deque[tuple[str, Future[None]]] = deque()
        self._n_kept = 0  # checkpoints in memory

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """What is saved inside is not waited for."""
        former, self.defers = self.defers, True
        try:
            yield
        finally:
            self.defers = former

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Make it into bytes now, write them later. Raises what earlier writing has raised."""
        if storage_options is not None or not _is_local(path):
            self.wait()
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        self._make_room()
        content = io.BytesIO()
        torch.save(checkpoint, content)
        self._n_kept += 1
        self._later(path, lambda: self._write(Path(path), content))
        if not self.defers:
            self.wait()

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """When all that was saved is there."""
        self.wait()
        return super().load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        """After what was saved before."""
        remove = super().remove_checkpoint
        if not self._pending or not _is_local(path):
            self.wait()
            remove(path)
        else:
            self._later(path, lambda: remove(path))

    def teardown(self) -> None:
        """The end of training: all files are there."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None

    def _write(self, path: Path, content: io.BytesIO) -> None:
        try:
            write_whole(path, content.getbuffer())
        finally:
            self._n_kept -= 1

    # ---- waiting --------------------------------------------------------------------------------

    def wait(self) -> None:
        """Until nothing is left to be written. Raises what writing has raised, once."""
        self._wait_until(lambda: not self._pending)

    def wait_for(self, path: Any) -> None:
        """Until it is known whether there is such a file."""
        self._wait_until(lambda: all(os.fspath(path) != name for name, _ in self._pending))

    def _make_room(self) -> None:
        while self._pending and self._pending[0][1].done():
            self._pending.popleft()[1].result()
        self._wait_until(lambda: self._n_kept < _MOST)

    def _wait_until(self, enough: Callable[[], bool]) -> None:
        while not enough():
            self._pending.popleft()[1].result()

    def _later(self, path: Any, work: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "hybridtrain-checkpoint")
        self._pending.append((os.fspath(path), self._thread.submit(work)))


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """The file is there with all its content, or not at all, also if the machine loses power."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _is_local(path: Any) -> bool:
    return "://" not in os.fspath(path)


# ---- whose files may come later -----------------------------------------------------------------


def save_in_background(trainer: Any) -> None:
    """In worker 0, which writes; a plugin of the user's own stays."""
    strategy = trainer.strategy
    if not trainer.is_global_zero or strategy._checkpoint_io is not None:
        return
    strategy.checkpoint_io = writer = BackgroundCheckpointIO()
    if not any(reads_at_once(logger) for logger in trainer.loggers):
        for callback in trainer.checkpoint_callbacks:
            if may_come_later(callback):
                _defer(callback, writer)


def _defer(callback: Any, writer: BackgroundCheckpointIO) -> None:
    save, exists = callback._save_checkpoint, callback.file_exists

    def save_later(*args: Any, **kwargs: Any) -> None:
        with writer.deferring():
            save(*args, **kwargs)

    def exists_then(filepath: Any, *args: Any, **kwargs: Any) -> bool:
        writer.wait_for(filepath)
        return bool(exists(filepath, *args, **kwargs))

    callback._save_checkpoint, callback.file_exists = save_later, exists_then


def may_come_later(callback: Any) -> bool:
    """Whether nobody relies on the file right after the callback has saved it.

    A link would lead nowhere until the file is there, and a callback of the user's own may do
    something with it.
    """
    kind: Any = type(callback)
    return (
        isinstance(callback, ModelCheckpoint)
        and kind._save_checkpoint is ModelCheckpoint._save_checkpoint
        and kind.file_exists is ModelCheckpoint.file_exists
        and callback.save_last != "link"
    )


def reads_at_once(logger: Logger) -> bool:
    """Whether the logger may upload checkpoints as soon as they are saved."""
    told = type(logger).after_save_checkpoint
    if told in (Logger.after_save_checkpoint, TensorBoardLogger.after_save_checkpoint):
        return False
    return bool(getattr(logger, "_log_model", True))
