"""The option ``record``: the file of a run's events, or the replay that runs the workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hybridtrain.errors import UserError
from hybridtrain.recording.record_file import RECORD_NAME, Writer
from hybridtrain.recording.recorder import KINDS


class Runner(Protocol):
    """Runs the workers of a recorded run in this process."""

    def play(self, strategy: Any, body: Any, job: Any) -> list[Any]:
        """Run the workers; return their results, or none if they did not finish."""


@dataclass
class Recording:
    """Path of the record, and plain data ``about`` the run (the command line's configuration).

    ``instead``: write no record; this runs the workers, in place of processes.
    """

    place: Path
    about: dict[str, Any] = field(default_factory=dict)
    instead: Runner | None = None

    @classmethod
    def at(cls, place: Any) -> Recording | None:
        """Make it from the user's option."""
        return None if place in (None, "") else cls(Path(place))

    def open(self) -> Writer:
        """Open a new file; older ones stay.

        Raises:
            UserError: if it cannot be written.
        """
        a_file = self.place.suffix and not self.place.is_dir()
        path = self.place if a_file else self.place / RECORD_NAME
        number, free = 2, path
        while free.exists():
            free, number = path.with_stem(f"{path.stem}-{number}"), number + 1
        try:
            free.parent.mkdir(parents=True, exist_ok=True)
            return Writer(free, KINDS)
        except OSError as error:
            raise UserError(
                f"record={self.place}: the record cannot be written ({error.strerror}); choose "
                "another place, or leave it out"
            ) from error
