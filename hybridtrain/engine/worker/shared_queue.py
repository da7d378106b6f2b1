"""A worker's mini-batches of the shared queue, which the server hands out."""

from __future__ import annotations

from hybridtrain.engine.protocol.messages import Claim, Claimed, Draw, Ticket
from hybridtrain.engine.worker.inbox import Inbox
from hybridtrain.engine.worker.pushes import Pushes
from hybridtrain.engine.worker.requests import Requests
from hybridtrain.engine.worker.steps import Steps
from hybridtrain.engine.worker.tickets import NotNeeded, Tickets


class SharedQueue:
    """Draws mini-batches, and knows which of them other workers have processed.

    Args:
        requests: to the server.
        pushes: request the mini-batch after the next.
        inbox: receives notices of other workers.
        steps: whether a push is offered, and whether the last mini-batch counts.
        tickets: the mini-batches received.
    """

    def __init__(
        self, requests: Requests, pushes: Pushes, inbox: Inbox, steps: Steps, tickets: Tickets
    ) -> None:
        self._requests, self._pushes, self._inbox = requests, pushes, inbox
        self._steps, self._tickets = steps, tickets

    def draw(self, request: Draw) -> Ticket:
        """The next mini-batch of a pass, or its end. The next push requests the one after it.

        That saves a round trip for each mini-batch; the worker still gets its mini-batch no sooner
        than if it asked after its release.
        """
        tickets = self._tickets
        if not self._steps.computes_on or tickets.is_under_way(request.lap):
            self._pushes.await_offered()
        if request.begins:
            tickets.begin(request.lap)
        ticket = tickets.take(request)
        if ticket is None:
            settles = not self._steps.computes_on
            tickets.add(request.lap, self._requests.ask(request, Ticket, settles=settles)[0])
            ticket = tickets.take(request)
            assert ticket is not None, "it was added"
        return ticket

    def claim(self) -> bool:
        """Training has processed its last mini-batch; whether no other worker has before."""
        if newest := self._tickets.covers[-1:]:
            counts = self._requests.ask(Claim(newest[0]), Claimed)[0].counts
            self._steps.count_last(self._tickets.keep(counts))
        return self._steps.counted

    def check_need(self) -> None:
        """Raises ``NotNeeded`` if another worker has processed training's last mini-batch."""
        self._inbox.receive_all()
        if self._tickets.is_overtaken:
            raise NotNeeded
