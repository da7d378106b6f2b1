"""How a worker process has ended, as it reports itself."""

from __future__ import annotations

import pickle
import re
import traceback
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Finished:
    """The worker has done its job; ``result`` is what it returns, if ``first``, for all."""

    result: Any
    first: bool = True


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
            str(pickle.loads(payload))  # some exceptions pickle, and then cannot be rebuilt or read
        except BaseException:  # it is the user's code, and may raise anything
            payload = b""
        return cls(payload, text, where, waits)

    def rebuild(self, worker: int, place: str = "") -> BaseException:
        """The exception, with the worker's number and traceback attached as a note."""
        where = "".join(f", {each}" for each in (self.where, place and f"on {place}") if each)
        note = f"This happened in worker {worker}{where}:\n{self.text}"
        try:
            error = pickle.loads(self.exception)
            error.add_note(note)
        except Exception:  # there is none, or it is one of a module that only the worker has
            error = None
        # Raised here, the first two would end this process quietly or close a generator.
        if isinstance(error, SystemExit | GeneratorExit) or not isinstance(error, BaseException):
            error = WorkerError(f"worker {worker} failed: {_last_words(self.text)}")
            error.add_note(note)
        return error


class WorkerError(RuntimeError):
    """A worker failed in a way that has no better exception."""


class WorkerDied(WorkerError):
    """A worker process ended without a word (killed, out of memory, crashed)."""


def _last_words(text: str) -> str:
    """The line of a traceback that says what was raised; that of a group has it at its side."""
    of_a_group = re.search(r"^ {2}\| (\S.*)$", text, re.MULTILINE)
    return of_a_group[1] if of_a_group else text.splitlines()[-1]


def in_words(error: BaseException) -> str:
    """What has happened to a worker, with its traceback if it has raised."""
    notes = [note for note in getattr(error, "__notes__", []) if "in worker" in note]
    return f"{notes[0]}\n{type(error).__name__}: {error}" if notes else str(error)
