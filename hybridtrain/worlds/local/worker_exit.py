"""How a worker's life ended, as it says itself."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Finished:
    """The worker has done its job; ``result`` is what it brings home."""

    result: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker's code raised. ``exception`` is pickled, or empty if it cannot be.

    ``waits``: to be told whether to write the last checkpoint of the run.
    """

    exception: bytes
    text: str
    where: str = ""
    waits: bool = False

    @classmethod
    def of(cls, error: BaseException, where: str = "", waits: bool = False) -> Failed:
        """Describe an exception that is being handled, ``where`` the worker has raised it."""
        text = "".join(traceback.format_exception(error)).rstrip()
        try:
            payload = pickle.dumps(error)
            pickle.loads(payload)  # some exceptions pickle, and then cannot be rebuilt
        except Exception:
            payload = b""
        return cls(payload, text, where, waits)

    def rebuild(self, worker: int, place: str = "") -> BaseException:
        """The exception, with the worker's number and traceback attached as a note."""
        error: BaseException | None = pickle.loads(self.exception) if self.exception else None
        if error is None or isinstance(error, SystemExit):  # this process is not to exit quietly
            error = WorkerError(f"worker {worker} failed: {self.text.splitlines()[-1]}")
        where = "".join(f", {each}" for each in (self.where, place and f"on {place}") if each)
        error.add_note(f"This happened in worker {worker}{where}:\n{self.text}")
        return error


class WorkerError(RuntimeError):
    """A worker failed in a way that has no better exception."""


class WorkerDied(WorkerError):
    """A worker process ended without a word (killed, out of memory, crashed)."""


def in_words(error: BaseException) -> str:
    """What has happened to a worker, with its traceback if it has raised."""
    notes = [note for note in getattr(error, "__notes__", []) if "in worker" in note]
    return f"{notes[0]}\n{type(error).__name__}: {error}" if notes else str(error)
