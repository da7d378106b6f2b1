"""Checkpoints written while training goes on, whole or not at all, and again after a failure.

Everything that has to be of one moment happens at that moment: the checkpoint is made into the
bytes of its file, by ``torch.save``, before anybody trains on. A thread only brings these bytes to
the disk. So the file is the one that would have been written while all wait, to the bit, and what
cannot be saved is said at once. Files appear whole (see :mod:`hybridtrain.util.files`). What a
callback deletes is deleted after what replaces it is there.

A disk that refuses a file (full, or read-only by now) ends no run: that is said, the next
checkpoint is tried again, and nothing is deleted until one has been written. What is missing at
the end is said again, see :class:`Unsaved`.

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
from torch.serialization import get_crc32_options, set_crc32_options

from hybridtrain.lightning.checkpointing.unsaved import Unsaved
from hybridtrain.util.files import seal, write_whole

_MOST = 2  # checkpoints in memory


class WholeCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints to local files in a thread, in order; others as Lightning does.

    Args:
        unsaved: is told of what could not be written.
    """

    def __init__(self, unsaved: Unsaved | None = None) -> None:
        self.unsaved = Unsaved() if unsaved is None else unsaved
        self.defers = False  # whether saving returns before the file is there
        self._thread: ThreadPoolExecutor | None = None
        self._pending: deque[tuple[str, Future[None]]] = deque()
        self._n_kept = 0  # checkpoints in memory
        self._kept_back: list[str] = []  # to be deleted when one has been written again

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
        """Make it into bytes now, write them later. Raises what is not the disk's fault."""
        if storage_options is not None or not _is_local(path):
            self.wait()
            plainly = super().save_checkpoint
            self._write(path, lambda: plainly(checkpoint, path, storage_options))
            return
        self._make_room()
        content = io.BytesIO()
        with _checksums():
            torch.save(checkpoint, content)
        seal(content)
        self._n_kept += 1
        self._later(path, lambda: self._write_local(Path(path), content))
        if not self.defers:
            self.wait()

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """When all that was saved is there."""
        self.wait()
        return super().load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        """After what was saved before; if that could not be saved, when something has been."""
        if self._pending and _is_local(path):
            self._later(path, lambda: self._remove(os.fspath(path)))
        else:
            self.wait()
            self._remove(os.fspath(path))

    def teardown(self) -> None:
        """The end of training: all files are there."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None

    # ---- in the thread, or when nobody is in it -------------------------------------------------

    def _write_local(self, path: Path, content: io.BytesIO) -> None:
        try:
            self._write(path, lambda: write_whole(path, content.getbuffer()))
        finally:
            self._n_kept -= 1

    def _write(self, path: Any, write: Callable[[], None]) -> None:
        name = os.fspath(path)
        try:
            write()
        except OSError as error:
            self.unsaved.lose(name, error)
            return
        self.unsaved.found(name)
        kept_back, self._kept_back = self._kept_back, []
        for old in kept_back:
            if old != name:
                self._remove(old)

    def _remove(self, path: str) -> None:
        if self.unsaved.refused:
            self._kept_back.append(path)
        else:
            try:
                super().remove_checkpoint(path)
            except OSError as error:
                self.unsaved.cannot_delete(path, error)
                self._kept_back.append(path)
                return
        self.unsaved.unwanted(path)

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


@contextmanager
def _checksums() -> Iterator[None]:
    """Let the file have them, whatever the user's program has told torch."""
    former = get_crc32_options()
    set_crc32_options(True)
    try:
        yield
    finally:
        set_crc32_options(former)


def _is_local(path: Any) -> bool:
    return "://" not in os.fspath(path)
