"""The log of updates that a worker makes in a recorded run; a replay repeats them."""

from __future__ import annotations

import time
from collections.abc import Callable

from hybridtrain.engine.memory import Store, UpdateMaker
from hybridtrain.engine.protocol.checksums import GradientRows, checksum_of
from hybridtrain.engine.protocol.messages import Push
from hybridtrain.engine.protocol.step_log import LoggedContribution, StepLog


class LoggedSteps:
    """Told of each update that a worker makes, or contributes to, without the server.

    This one logs nothing, for runs that are not recorded.
    """

    awaits = False  # the answer to each report, before the worker goes on

    def admits(self, push: Push, version: int) -> bool:
        """Whether the worker may make the update of this version, or arrive in its round.

        The gradient of the push lies in the row.
        """
        return True

    def write(self, version: int) -> None:
        """Log the contribution, before the update of this version counts."""

    def made(self) -> None:
        """The update is made, or the worker waits for others in its round."""

    def goes_on(self) -> None:
        """The worker computes from now."""

    def noted(self) -> None:
        """The worker has sent a note, which has no answer."""

    def tells(self, due: bool) -> bool:
        """Whether to report steps now; ``due``: the last report was long ago."""
        return due


class StepWriter(LoggedSteps):
    """Logs one worker's contributions in shared memory.

    Args:
        worker: its number.
        store: the shared rows.
        log: read by the server.
        catch_up: returns when the server has read all that is logged and noted.
    """

    awaits = True  # so that the report is at its place among the updates

    def __init__(
        self, worker: int, store: Store, log: StepLog, catch_up: Callable[[], object]
    ) -> None:
        self._worker, self._log, self._catch_up = worker, log, catch_up
        self._place = worker if store.maker is UpdateMaker.LAST_WORKER else 0
        self._rows = GradientRows(store)
        self._since_s = time.monotonic()
        self._taken: LoggedContribution | None = None
        self._noted = False  # the server may not have read this worker's last note yet

    def admits(self, push: Push, version: int) -> bool:
        at_s, samples = time.monotonic(), push.weight if push.samples is None else push.samples
        print = checksum_of(push, self._worker, self._rows)
        self._taken = LoggedContribution(self._worker, print, at_s - self._since_s, samples, at_s)
        if self._noted or not self._log.has_room(version):
            self._catch_up()
            self._noted = False
        return True

    def write(self, version: int) -> None:
        assert self._taken is not None, "a push is taken first"
        self._log.write(version, self._place, self._taken)

    def goes_on(self) -> None:
        self._since_s = time.monotonic()

    def noted(self) -> None:
        self._noted = True
