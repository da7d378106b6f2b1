"""Calls of learning-rate schedules that workers make by hand, where workers run freely.

Each worker steps schedules of its own. What one worker calls in a mini-batch the others call as
well, so that a schedule counts the calls of all, as on one device.
"""

from __future__ import annotations

from collections.abc import Collection

from hybridtrain.protocol.messages import Answer, Called, ScheduleCall
from hybridtrain.server.rounds import Replies


class ScheduleCalls:
    """Keeps what each worker has to hear.

    Args:
        members: the workers that are there; the server keeps the set up to date.
    """

    def __init__(self, members: Collection[int]) -> None:
        self._members = members
        self._unheard: dict[int, list[ScheduleCall]] = {}

    def take(self, worker: int, called: Called) -> None:
        """The worker has made these calls."""
        for other in self._members:
            if other != worker:
                self._unheard.setdefault(other, []).extend(called.calls)

    def told_with(self, replies: Replies) -> Replies:
        """The replies; before its next answer a worker hears what the others have called.

        So it hears that in the order of the server's events, which a replay repeats.
        """
        if not self._unheard:
            return replies
        told: Replies = []
        for worker, reply in replies:
            if isinstance(reply, Answer) and (calls := self._unheard.pop(worker, None)):
                told.append((worker, Called(tuple(calls))))
            told.append((worker, reply))
        return told
