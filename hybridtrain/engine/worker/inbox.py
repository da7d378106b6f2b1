"""The messages that a worker receives: answers, and notices that may come at any time.

``Stop`` is such a notice. The worker stops at the next boundary between mini-batches, or at once
if the pending answer will never be sent.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from hybridtrain.engine.protocol.messages import (
    Back,
    Called,
    Gone,
    Overtaken,
    Progress,
    Refused,
    Released,
    Reply,
    RequestProgress,
    SavePermission,
    Stop,
)
from hybridtrain.engine.worker.steps import Steps
from hybridtrain.engine.worker.surroundings import Connection, Listeners
from hybridtrain.engine.worker.tickets import Tickets
from hybridtrain.engine.worker.worker_group import WorkerGroup
from hybridtrain.errors import UserError


class StopRequested(KeyboardInterrupt):
    """The server stops this worker. Not an ``Exception``, so user code does not catch it."""


class Inbox:
    """Waits for answers, and gives each notice to the part that it concerns.

    Args:
        line: to the server.
        group: hears of lost and restarted workers.
        tickets: hear that another worker has processed a mini-batch.
        steps: get a release that nobody waits for.
        listeners: the callbacks of this worker.
    """

    def __init__(
        self,
        line: Connection,
        group: WorkerGroup,
        tickets: Tickets,
        steps: Steps,
        listeners: Listeners,
    ) -> None:
        self._line, self._group, self._tickets = line, group, tickets
        self._steps, self._listeners = steps, listeners
        self.stop: Stop | None = None
        self._permission: SavePermission | None = None  # received after this worker's stop
        self._asked: dict[int, RequestProgress] = {}  # unanswered, by the worker to be restarted

    @property
    def must_stop(self) -> bool:
        """Whether this worker stops at the next boundary between mini-batches."""
        return self.stop is not None and self.stop.behind is None

    def answer(self, kind: type[Any], in_step: bool = False) -> tuple[Any, int | None]:
        """Wait for an answer of this kind; returns it with the descriptor sent beside it.

        ``in_step``: in a step, which a restarted worker repeats.

        Raises:
            StopRequested: no answer will be sent.
            UserError: the server has refused the request.
        """
        while True:
            if self._asked and in_step:
                self._report_progress()
            if in_step and (meanwhile := self._listeners.meanwhile) is not None:
                while not self._line.ready() and (pause_s := meanwhile()) is not None:
                    time.sleep(pause_s)
            reply, fd = self._line.receive()
            match reply:
                case Stop(now=True) if kind is not Released and self._steps.computes_on:
                    self._receive(reply)  # it replaces the release: the request is still answered
                case Stop(now=True):
                    self.stop = reply
                    raise StopRequested
                case SavePermission():  # this worker has failed: no other answer will follow
                    self._permission = reply
                    raise StopRequested
                case Stop() | Gone() | Back() | Overtaken() | Called() | RequestProgress():
                    self._receive(reply)
                case Released() if kind is not Released:
                    self._receive(reply)
                case Refused(reason):
                    raise UserError(reason)
                case _:
                    assert isinstance(reply, kind), reply
                    self._steps.maker.log.goes_on()
                    return reply, fd

    def receive_all(self) -> None:
        """Act on all that has come, until a notice stops this worker."""
        while not self.must_stop and self._line.ready():
            self._receive(self._line.receive()[0])

    def disturbs(self) -> bool:
        """Receive all notices; returns whether one of them ends the shared round."""
        while self.stop is None and self._line.ready():
            self._receive(self._line.receive()[0])
        return self.stop is not None or not self._group.is_whole

    def await_permission(self) -> Mapping[int, bytes] | None:
        """In a stopped worker: if it is to save, what the workers have left for the checkpoint."""
        reply: Any = self._permission
        while not isinstance(reply, SavePermission):
            reply = self._line.receive()[0]  # may be the reply to an earlier request
        self._group.choose_saver(reply.saves)
        return reply.left if reply.saves else None

    def _receive(self, reply: Reply) -> None:
        """Act on a notice, or on the release of a push that is settled later."""
        match reply:
            case Stop():
                self.stop = reply
                if reply.now and (offered := self._steps.offered) is not None:
                    offered.lose()
            case Gone():
                self._group.lose(reply)
                self._listeners.change()
            case Back(worker):
                self._group.restore(worker)
                self._listeners.change()
            case Overtaken(batch):
                self._tickets.overtaken.add(batch)
            case Called(calls):
                self._listeners.calls(calls)
            case Released() | Refused():
                self._steps.receive(reply)
            case _:
                assert isinstance(reply, RequestProgress), reply
                self._asked[reply.worker] = reply

    def _report_progress(self) -> None:
        """This worker waits in a step, which a restarted worker repeats."""
        assert self._listeners.tell is not None, "a worker that is asked trains"
        asked, self._asked = self._asked, {}
        payload = self._listeners.tell()
        for each in asked.values():
            self._line.send(Progress(each.worker, payload, each.question))
