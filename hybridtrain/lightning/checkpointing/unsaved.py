"""Which checkpoints a disk has refused, told to the process that started the run.

The worker that writes may end in any way, and a full disk is no place to leave a note, so the note
lies in a nameless file in memory, which the calling process holds.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from hybridtrain.memory.scratch_file import Scratch


@dataclass
class Unsaved:
    """What could not be written.

    ``failures`` counts all attempts that have failed, ``lost`` has the files that are wanted and
    not there (or old), with the reason; ``refused`` says whether the last attempt has failed.
    """

    failures: int = 0
    lost: dict[str, str] = field(default_factory=dict)
    refused: bool = False
    room: str = ""  # the path of the calling process's file

    def lose(self, path: str, error: OSError) -> None:
        """The file could not be written."""
        reason = error.strerror or str(error)
        self.failures, self.refused = self.failures + 1, True
        self.lost[path] = reason
        rank_zero_warn(
            f"the checkpoint {path} could not be written ({reason}); training goes on, the next "
            "one is tried again, and older ones are kept until then"
        )
        self._leave()

    def found(self, path: str) -> None:
        """The file has been written."""
        self.refused = False
        if self.lost.pop(path, None) is not None or self.failures:
            self._leave()

    def unwanted(self, path: str) -> None:
        """Nobody asks for the file any more."""
        if self.lost.pop(path, None) is not None:
            self._leave()

    def cannot_delete(self, path: str, error: OSError) -> None:
        """A file that is not wanted any more stays."""
        rank_zero_warn(f"the old checkpoint {path} could not be deleted ({error.strerror})")

    def _leave(self) -> None:
        if self.room:
            content = {k: v for k, v in asdict(self).items() if k != "room"}
            with suppress(OSError):  # who has asked is no more
                Path(self.room).write_text(json.dumps(content))


class UnsavedReport:
    """In the calling process: what is heard of the worker that writes. Not for other processes."""

    def __init__(self) -> None:
        self._scratch = Scratch()

    @property
    def fresh(self) -> Unsaved:
        """For the worker that writes, in whatever process."""
        return Unsaved(room=self._scratch.path)

    def hear(self) -> Unsaved:
        """What it has said."""
        path = self._scratch.path
        text = Path(path).read_text() if path else ""
        self._scratch.close()
        said: dict[str, Any] = json.loads(text) if text else {}
        return Unsaved(**said)
