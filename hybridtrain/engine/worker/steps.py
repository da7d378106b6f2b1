"""The steps that a worker's parameters contain, and the push whose release is pending."""

from __future__ import annotations

from functools import partial

from hybridtrain.engine.protocol.messages import Refused, Released
from hybridtrain.engine.worker.makers.maker import Maker
from hybridtrain.engine.worker.pending_push import PendingPush, Taking
from hybridtrain.engine.worker.tickets import Tickets
from hybridtrain.engine.worker.worker_group import WorkerGroup
from hybridtrain.errors import UserError


class Steps:
    """What this worker knows of the steps of the masters, from releases and its own updates.

    Args:
        group: a restarted worker has joined with its first step.
        tickets: get the mini-batches that come with a release.
    """

    def __init__(self, group: WorkerGroup, tickets: Tickets) -> None:
        self._group, self._tickets = group, tickets
        self.version = 0  # of this worker's parameters
        self.counted = True  # the pushes since user code has begun to count
        self.has_stepped = False  # in this process
        self.offered: PendingPush | None = None  # a push whose release is pending
        self.maker = Maker()  # until parameters are shared

    @property
    def unsettled(self) -> PendingPush | None:
        """The offered push, if the parameters and their version depend on its release."""
        return None if self.offered is None or self.offered.made else self.offered

    @property
    def expected_version(self) -> int:
        """The least version of the parameters after the release of an offered push."""
        return self.version + (self.unsettled is not None)

    @property
    def computes_on(self) -> bool:
        """Whether the offered push needs no release yet."""
        return self.offered is not None and self.offered.later

    def count_pushes(self) -> None:
        """Begin anew: :attr:`counted` is false once a push is dropped."""
        self.counted = True

    def count_last(self, counts: bool) -> None:
        """Whether the last mini-batch counts."""
        self.counted = counts

    def choose(self, maker: Maker) -> None:
        """From now on this maker makes updates, or leaves them to the server."""
        self.maker = maker

    def reach(self, version: int) -> None:
        """The parameters count as those of this version, whoever has written them."""
        self.version = version

    def read(self, version: int) -> None:
        """The server has updated the parameters to this version."""
        self.version = version
        self.maker.read(version)

    def make(self, version: int) -> None:
        """This worker has made the update with this number."""
        self.version, self.has_stepped = version, True

    def expect(self, push: PendingPush) -> None:
        """A push is offered: its release is pending."""
        self.offered = push

    def pop_offered(self) -> PendingPush | None:
        """Take the offered push, to settle it."""
        offered, self.offered = self.offered, None
        return offered

    def take(self, released: Released | Refused, then: Taking, push: PendingPush) -> None:
        """Act on the release of a push, and hand it to ``then``."""
        if isinstance(released, Refused):
            raise UserError(released.reason)
        for draw, ticket in zip(push.draws, released.tickets, strict=False):
            self._tickets.add(draw.lap, ticket)
        if not push.made:  # else this worker knows a newer version
            self.version, self.counted = released.version, self.counted and released.counted
            self.has_stepped = True
        if self._group.joins:  # its first step has ended
            self._group.rejoin(joined=True)
        then(released)
        if not push.made:
            self.maker.asked(push.covers if released.counted else 0, released.version)

    def receive(self, reply: Released | Refused) -> None:
        """The release has come before anybody has waited for it."""
        offered = self.pop_offered()
        assert offered is not None, "it is settled later"
        offered.settle(partial(self.take, reply))
