"""Write checkpoints in a background thread: whole files, retried after a refusing disk.

``torch.save`` serializes the checkpoint into memory before training continues; the thread only
writes these bytes. So the file equals, to the bit, one written while all workers wait, and an
object that cannot be saved raises at once. Files appear whole (:mod:`hybridtrain.util.files`). A
file that a callback deletes stays until its replacement is on disk.

A disk that refuses a file (full, or read-only) ends no run: the writer warns, tries the next
checkpoint, and deletes nothing until one is written. The calling process warns again of files that
are missing at the end (:class:`Unsaved`).

The writer waits for files of ``ModelCheckpoint`` only at the end of training, when one is read or
its existence is asked, and before a third is kept in memory. ``trainer.save_checkpoint`` returns
when its file is on disk.
"""

from __future__ import annotations

import io
import json
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning_utilities.core.rank_zero import rank_zero_warn

from hybridtrain.engine.memory.scratch_file import Scratch
from hybridtrain.util.attributes import temporarily
from hybridtrain.util.files import write_whole
from hybridtrain.util.torch_file import serialized

_MOST = 2  # checkpoints in memory


class WholeCheckpointIO(TorchCheckpointIO):
    """Writes local files in a thread, in order; other paths as Lightning does.

    Args:
        unsaved: records files that could not be written.
        may_defer: whether callbacks may let saving return before the file is on disk.
    """

    def __init__(self, unsaved: Unsaved | None = None, may_defer: bool = False) -> None:
        self.unsaved = Unsaved() if unsaved is None else unsaved
        self.may_defer, self.defers = may_defer, False  # this saving does
        self._thread: ThreadPoolExecutor | None = None
        self._pending: deque[tuple[str, Future[None]]] = deque()
        self._n_kept = 0  # checkpoints in memory
        self._kept_back: list[str] = []  # to be deleted after the next successful write

    def deferring(self) -> AbstractContextManager[None]:
        """Let ``save_checkpoint`` return before the file is written."""
        return temporarily(self, defers=True)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Serialize now, write later. Raises all errors but the disk's."""
        if storage_options is not None or not _is_local(path):
            self.wait()
            plainly = super().save_checkpoint
            self._write(path, lambda: plainly(checkpoint, path, storage_options))
            return
        self._make_room()
        content = serialized(checkpoint)
        self._n_kept += 1
        self._later(path, lambda: self._write_local(Path(path), content))
        if not self.defers:
            self.wait()

    def save_later(self, proceed: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """In place of a callback's saving: do not wait for the file."""
        with self.deferring():
            proceed(*args, **kwargs)

    def exists_then(self, proceed: Callable[..., bool], path: Any, *args: Any) -> bool:
        """In place of a callback's ``file_exists``: wait for the file first."""
        self.wait_for(path)
        return bool(proceed(path, *args))

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load after all pending files are written."""
        self.wait()
        return super().load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        """Delete after the pending writes; if these fail, after the next successful one."""
        if self._pending and _is_local(path):
            self._later(path, lambda: self._remove(os.fspath(path)))
        else:
            self.wait()
            self._remove(os.fspath(path))

    def teardown(self) -> None:
        """Wait for all files, and end the thread."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None

    # ---- in the thread, or while it is idle -----------------------------------------------------

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
        if ".." in Path(path).parts:  # of a checkpoint's callbacks: theirs are resolved
            rank_zero_warn(f"{path} is not deleted: no checkpoint of this run is called so")
        elif self.unsaved.refused:
            self._kept_back.append(path)
        else:
            try:
                super().remove_checkpoint(path)
            except OSError as error:
                rank_zero_warn(f"the old checkpoint {path} could not be deleted ({error.strerror})")
                self._kept_back.append(path)
                return
        self.unsaved.unwanted(path)

    # ---- waiting --------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until no write is pending. Raises a write's error, once."""
        self._wait_until(lambda: not self._pending)

    def wait_for(self, path: Any) -> None:
        """Wait until no write of this file is pending."""
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


def _is_local(path: Any) -> bool:
    return "://" not in os.fspath(path)


# ---- refused by the disk ------------------------------------------------------------------------


@dataclass
class Unsaved:
    """Checkpoints that a disk has refused.

    The writing worker leaves the record in an anonymous file in memory, which the calling process
    holds: the worker may end in any way, and the disk may be full.

    ``failures``: failed attempts; ``lost``: missing (or old) files that are still wanted, with the
    reason; ``refused``: whether the last attempt failed; ``room``: path of the anonymous file.
    """

    failures: int = 0
    lost: dict[str, str] = field(default_factory=dict)
    refused: bool = False
    room: str = ""

    def lose(self, path: str, error: OSError) -> None:
        """Record that the file could not be written, and warn."""
        reason = error.strerror or str(error)
        self.failures, self.refused = self.failures + 1, True
        self.lost[path] = reason
        rank_zero_warn(
            f"the checkpoint {path} could not be written ({reason}); training goes on, the next "
            "one is tried again, and older ones are kept until then"
        )
        self._leave()

    def found(self, path: str) -> None:
        """Record that the file has been written."""
        self.refused = False
        if self.lost.pop(path, None) is not None or self.failures:
            self._leave()

    def unwanted(self, path: str) -> None:
        """Record that the file is no longer wanted."""
        if self.lost.pop(path, None) is not None:
            self._leave()

    def _leave(self) -> None:
        if self.room:
            content = {k: v for k, v in asdict(self).items() if k != "room"}
            with suppress(OSError):  # the calling process has ended
                Path(self.room).write_text(json.dumps(content))


def heard(scratch: Scratch) -> Unsaved:
    """In the calling process: read the writer's record, and close its file."""
    text = Path(scratch.path).read_text() if scratch.path else ""
    scratch.close()
    return Unsaved(**json.loads(text)) if text else Unsaved()
