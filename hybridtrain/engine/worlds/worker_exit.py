"""A worker's report of its end, and exceptions for workers that failed."""

from __future__ import annotations

import pickle
import re
import traceback
from dataclasses import dataclass
from typing import Any

from hybridtrain.errors import Lost


@dataclass(frozen=True, slots=True)
class Finished:
    """The worker has finished with this result; ``first``: it is the leader, of all workers."""

    result: Any
    first: bool = True


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker's code raised. ``exception`` is pickled, or empty if it cannot be.

    ``waits``: the worker waits for permission to write the run's last checkpoint; ``left``: for
    that checkpoint, if another worker writes it.
    """

    exception: bytes
    text: str
    where: str = ""
    waits: bool = False
    left: bytes = b""

    @classmethod
    def of(
        cls, error: BaseException, where: str = "", waits: bool = False, left: bytes = b""
    ) -> Failed:
        """Describe an exception; ``where``: the worker's activity."""
        text = "".join(traceback.format_exception(error)).rstrip()
        try:
            payload = pickle.dumps(error)
            str(pickle.loads(payload))  # some exceptions can be pickled, but not rebuilt or read
        except BaseException:  # user code, which may raise anything
            payload = b""
        return cls(payload, text, where, waits, left)

    def rebuild(self, worker: int, location: str = "") -> BaseException:
        """The exception, with the worker's number and traceback attached as a note."""
        where = "".join(f", {each}" for each in (self.where, location and f"on {location}") if each)
        note = f"This happened in worker {worker}{where}:\n{self.text}"
        try:
            error = pickle.loads(self.exception)
            error.add_note(note)
        except Exception:  # none, or its module cannot be imported here
            error = None
        # Raised here, these two would end this process silently or close a generator.
        if isinstance(error, SystemExit | GeneratorExit) or not isinstance(error, BaseException):
            error = WorkerError(f"worker {worker} failed: {_last_words(self.text)}")
            error.add_note(note)
        return error


class WorkerError(RuntimeError):
    """A worker failed, and its exception cannot be raised here."""


class WorkerDied(WorkerError, Lost):
    """A worker process ended without a report (killed, out of memory, crashed).

    ``counts``: not together with another one of its host, which was lost.
    """

    def __init__(self, text: str, counts: bool = True) -> None:
        super().__init__(text)
        self.counts = counts


def _last_words(text: str) -> str:
    """The line of a traceback with the exception, also of an exception group."""
    of_a_group = re.search(r"^ {2}\| (\S.*)$", text, re.MULTILINE)
    return of_a_group[1] if of_a_group else text.splitlines()[-1]


def in_words(error: BaseException) -> str:
    """The error as text, with the worker's traceback if it raised."""
    notes = [note for note in getattr(error, "__notes__", []) if "in worker" in note]
    return f"{notes[0]}\n{type(error).__name__}: {error}" if notes else str(error)
