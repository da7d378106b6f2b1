"""The log of updates that a worker makes in a recorded run; a replay repeats them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from hybridtrain.memory import Store, UpdateMaker
from hybridtrain.protocol.checksums import GradientRows, checksum_of
from hybridtrain.protocol.messages import Push
from hybridtrain.protocol.step_log import Contribution, StepLog


class LoggedSteps(Protocol):
    """Told of each update that a worker makes, or contributes to, without the server."""

    def admits(self, push: Push, version: int) -> bool:
        """Whether the worker may make the update of this version, or arrive in its round.

        The gradient of the push lies in the row.
        """
        ...

    def write(self, version: int) -> None:
        """Log the contribution, before the update of this version counts."""
        ...

    def made(self) -> None:
        """The update is made, or the worker waits for others in its round."""
        ...

    def goes_on(self) -> None:
        """The worker computes from now."""
        ...

    def noted(self) -> None:
        """The worker has sent a note, which has no answer."""
        ...

    def tells(self, due: bool) -> bool:
        """Whether to report steps now; ``due``: the last report was long ago."""
        ...


class StepWriter:
    """Logs one worker's contributions in shared memory.

    Args:
        worker: its number.
        store: the shared rows.
        log: read by the server.
        catch_up: returns when the server has read all that is logged and noted.
    """

    def __init__(
        self, worker: int, store: Store, log: StepLog, catch_up: Callable[[], object]
    ) -> None:
        self._worker, self._log, self._catch_up = worker, log, catch_up
        self._place = worker if store.maker is UpdateMaker.LAST_WORKER else 0
        self._rows = GradientRows(store)
        self._since_s = time.monotonic()
        self._taken: Contribution | None = None
        self._noted = False  # the server may not have read this worker's last note yet

    def admits(self, push: Push, version: int) -> bool:
        """See :class:`LoggedSteps`."""
        at_s, samples = time.monotonic(), push.weight if push.samples is None else push.samples
        print = checksum_of(push, self._worker, self._rows)
        self._taken = Contribution(self._worker, print, at_s - self._since_s, samples, at_s)
        if self._noted or not self._log.has_room(version):
            self._catch_up()
            self._noted = False
        return True

    def write(self, version: int) -> None:
        """See :class:`LoggedSteps`."""
        assert self._taken is not None, "a push is taken first"
        self._log.write(version, self._place, self._taken)

    def made(self) -> None:
        """See :class:`LoggedSteps`."""

    def goes_on(self) -> None:
        """See :class:`LoggedSteps`."""
        self._since_s = time.monotonic()

    def noted(self) -> None:
        """See :class:`LoggedSteps`."""
        self._noted = True

    def tells(self, due: bool) -> bool:
        """See :class:`LoggedSteps`."""
        return due
