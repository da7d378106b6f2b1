"""Trains in virtual time: real workers and gradients in one process, with recorded service times.

Theory of operation. As in :mod:`hybridtrain.virtual.virtual_world` a heap holds when each
worker ends its computation; but here each worker runs the user's own loops, on a thread that is
suspended at every message. A push arrives after the worker's next service time, any other message
at once. So another policy can be tried on a recorded run: the same workers at the same speed, with
gradients at the parameters that they would have read. Updates and messages take no time. The result
does not depend on this machine's speed; the same times give the same bits.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

from hybridtrain.engine.protocol.events import (
    Completed,
    Event,
    Received,
    Removed,
    TimerExpired,
    UpdateDue,
)
from hybridtrain.engine.protocol.messages import NOTES, Answer, Average, Push, Stop
from hybridtrain.engine.recording.recorder import Stamp
from hybridtrain.engine.server.server import ParameterServer
from hybridtrain.engine.worlds.in_process import Body, Cell, MadePush, ThreadWorld, Word
from hybridtrain.errors import UserError
from hybridtrain.util.turn_taking import FunctionEnded


class Rehearsal:
    """Runs bodies in virtual time.

    Args:
        server: its clock is ``stamp``.
        stamp: shows virtual time.
        threads: torch threads of each worker.
        times: for each worker, returns the seconds of its next gradient.
        cells: see :class:`hybridtrain.engine.worlds.in_process.ThreadWorld`.

    Raises:
        UserError: if workers step the parameters themselves.
    """

    def __init__(
        self,
        server: ParameterServer,
        stamp: Stamp,
        threads: int,
        times: Sequence[Callable[[], float]],
        cells: Sequence[Cell] = (),
    ) -> None:
        if server.requirements.in_place:
            raise UserError(
                "a policy without a lock was given, under which workers write to the parameters "
                "whenever they like; that has no order that could be simulated"
            )
        self._server, self._stamp, self._times = server, stamp, times
        self._world = ThreadWorld(server, len(times), threads, lambda worker: "", cells)
        self._arriving: list[tuple[float, int, int, Word]] = []  # time, worker, a number, message
        self._said = 0
        self._averaged: set[int] = set()  # workers whose next push takes no further computation
        self._waiting: set[int] = set()  # workers whose message has arrived, for an answer
        stamp.stand(0.0)

    def run(self, bodies: Sequence[Body]) -> list[Any]:
        """The results of the bodies.

        Raises:
            BaseException: of the first body that fails.
        """
        self._world.start(bodies)
        try:
            for worker in range(len(bodies)):
                self._go_on(worker)
            while self._arriving or self._server.wake_at_s is not None:
                self._step()
        finally:
            self._world.close()
        if self._waiting:
            names = ", ".join(map(str, sorted(self._waiting)))
            raise UserError(f"under this policy workers ({names}) wait for others that never come")
        return [self._world.result(worker) for worker in range(len(bodies))]

    def _step(self) -> None:
        wake_at_s = self._server.wake_at_s
        if wake_at_s is not None and (not self._arriving or wake_at_s <= self._arriving[0][0]):
            self._stamp.stand(max(self._stamp.at_s, wake_at_s))
            self._on(TimerExpired())
            return
        at_s, worker, _, said = heapq.heappop(self._arriving)
        self._stamp.stand(at_s)
        if isinstance(said, FunctionEnded):
            self._end(worker, said.error)
            return
        assert not isinstance(said, MadePush), "here the server makes all updates"
        if not isinstance(said, NOTES):
            self._waiting.add(worker)
        self._on(Received(worker, said))
        if isinstance(said, NOTES):  # it waits for no answer
            self._go_on(worker)

    def _end(self, worker: int, error: BaseException | None) -> None:
        if self._server.failure is not None:
            raise self._server.failure
        if error is not None:
            raise error
        self._on(Completed(worker))
        self._on(Removed(worker))

    def _on(self, event: Event) -> None:
        self._tell(event)
        while self._server.update_is_due:
            self._tell(UpdateDue())

    def _tell(self, event: Event) -> None:
        replies = self._server.on(event)
        self._world.answer(replies)
        for worker, reply in replies:
            answers = isinstance(reply, Answer) or (isinstance(reply, Stop) and reply.now)
            if answers and worker in self._waiting:  # else it reads the news with its next answer
                self._waiting.discard(worker)
                self._go_on(worker)

    def _go_on(self, worker: int) -> None:
        """Run the worker to its next message, and schedule when that arrives."""
        said = self._world.next(worker)
        at_s = self._stamp.at_s + self._takes_s(worker, said)
        self._said += 1
        heapq.heappush(self._arriving, (at_s, worker, self._said, said))

    def _takes_s(self, worker: int, said: Word) -> float:
        if isinstance(said, Average):
            self._averaged.add(worker)
        elif not isinstance(said, Push):
            return 0.0
        elif worker in self._averaged:
            self._averaged.discard(worker)
            return 0.0
        return self._times[worker]()
