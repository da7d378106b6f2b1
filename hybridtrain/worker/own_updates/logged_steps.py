"""What a recorded run keeps of updates that its worker makes, and how a replay repeats them."""

from __future__ import annotations

import time
from typing import Protocol

from hybridtrain.memory import Store
from hybridtrain.protocol.checksums import GradientRows, checksum_of
from hybridtrain.protocol.messages import Push
from hybridtrain.protocol.step_log import Contribution, StepLog


class LoggedSteps(Protocol):
    """Told of each update that a worker makes, or contributes to, without the server."""

    def take(self, push: Push) -> None:
        """The worker is about to make an update of this push, whose gradient lies in the row."""
        ...

    def has_room(self, version: int) -> bool:
        """Whether the update can be logged before the server has read earlier ones."""
        ...

    def may_make(self) -> bool:
        """Whether the worker may make the update, or arrive in its round."""
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

    def tells(self, due: bool) -> bool:
        """Whether to report steps now; ``due``: the last report was long ago."""
        ...


class StepWriter:
    """Logs one worker's contributions in shared memory.

    Args:
        worker: its number.
        store: the shared rows.
        log: read by the server.
    """

    def __init__(self, worker: int, store: Store, log: StepLog) -> None:
        self._worker, self._log = worker, log
        self._place = worker if store.made is None else 0
        self._rows = GradientRows(store)
        self._since_s = time.monotonic()
        self._taken: Contribution | None = None

    def take(self, push: Push) -> None:
        """See :class:`LoggedSteps`."""
        at_s, samples = time.monotonic(), push.weight if push.samples is None else push.samples
        print = checksum_of(push, self._worker, self._rows)
        own_s = at_s - self._since_s
        self._taken = Contribution(self._worker, print, own_s, samples, at_s)

    def has_room(self, version: int) -> bool:
        """See :class:`LoggedSteps`."""
        return self._log.has_room(version)

    def may_make(self) -> bool:
        """See :class:`LoggedSteps`."""
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

    def tells(self, due: bool) -> bool:
        """See :class:`LoggedSteps`."""
        return due
