"""The calls of learning-rate schedules that a worker has made, for the server."""

from __future__ import annotations

from hybridtrain.engine.protocol.messages import Called, ScheduleCall
from hybridtrain.engine.worker.surroundings import Connection


class ScheduleCalls:
    """Collects calls; the next message that needs them sends them first.

    Args:
        line: to the server.
    """

    def __init__(self, line: Connection) -> None:
        self._line = line
        self._unsent: list[ScheduleCall] = []
        self.has_called = False  # from then on the server makes each update

    def add(self, call: ScheduleCall) -> None:
        """Record a call."""
        self._unsent.append(call)
        self.has_called = True

    def send(self) -> None:
        """Send the calls that the server does not know."""
        if self._unsent:
            calls, self._unsent = self._unsent, []
            self._line.send(Called(tuple(calls)))
