"""Mini-batches that a worker has drawn from the shared queue, and what it has not handed over."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from hybridtrain.engine.protocol.messages import Draw, DrawnBatch, LoaderPass, Ticket
from hybridtrain.engine.protocol.spans import total


class NotNeeded(Exception):
    """Another worker has processed this mini-batch, too, and before this one."""


class Tickets:
    """The mini-batches received, those that training has taken, and requests for the next push.

    Args:
        worker: its number.
    """

    def __init__(self, worker: int) -> None:
        self.most = 1  # mini-batches per request
        self.covers: list[DrawnBatch] = []  # taken, and not handed over
        self.overtaken: set[DrawnBatch] = set()  # another worker's answer has come first
        self._worker = worker
        self._here: dict[LoaderPass, deque[Ticket]] = {}
        self._wanted: dict[LoaderPass, Draw] = {}
        self._under_way: set[LoaderPass] = set()
        self._few: dict[LoaderPass, int] = {}  # request more when so many are left

    @property
    def wanted(self) -> bool:
        """Whether the next push has a request."""
        return bool(self._wanted)

    @property
    def is_mixed(self) -> bool:
        """Whether the next push covers several loaders, whose order only this worker knows."""
        return len({cover.lap for cover in self.covers}) > 1

    @property
    def is_overtaken(self) -> bool:
        """Whether training's last mini-batch is not needed any more."""
        return bool(self.covers) and self.covers[-1] in self.overtaken

    def cover(self, batch: DrawnBatch) -> None:
        """Training takes this mini-batch, which the next push covers, too."""
        self.covers.append(batch)

    def keep(self, counts: bool) -> bool:
        """Whether the last mini-batch counts; if not, nothing is handed over for it."""
        if not counts:
            self.covers.pop()
        return counts

    def draw_at_once(self, most: int) -> None:
        """Draw so many mini-batches together, while plenty are left."""
        self.most = most

    def pop_covers(self) -> list[DrawnBatch]:
        """Take the mini-batches that are handed over now."""
        covers, self.covers = self.covers, []
        return covers

    def begin(self, lap: LoaderPass) -> None:
        """Begin a pass: forget earlier passes of the loader."""
        self.overtaken.clear()
        for former in [each for each in self._here if each.loader == lap.loader]:
            del self._here[former], self._few[former]
        for former in [each for each in self._wanted if each.loader == lap.loader]:
            del self._wanted[former]
        self._under_way = {each for each in self._under_way if each.loader != lap.loader}

    def ask(self) -> tuple[Draw, ...]:
        """The requests for the push that is sent now."""
        asked = tuple(self._wanted.values())
        self._under_way |= self._wanted.keys()
        self._wanted = {}
        return asked

    def is_under_way(self, lap: LoaderPass) -> bool:
        """Whether a push has requested the next mini-batch, and its release has not arrived."""
        return lap in self._under_way

    def add(self, lap: LoaderPass, ticket: Ticket) -> None:
        """Add a received ticket."""
        self._under_way.discard(lap)
        here = self._here.setdefault(lap, deque())
        here.append(ticket)
        self._few[lap] = len(ticket.more) // 2
        here.extend(replace(ticket, spans=spans, more=()) for spans in ticket.more)

    def take(self, request: Draw) -> Ticket | None:
        """The next mini-batch of the request's pass, if received.

        If few are left, the next push requests more.
        """
        lap, here = request.lap, self._here.get(request.lap)
        if not here:
            return None
        ticket = here.popleft()
        newest = here[-1] if here else ticket  # a smaller one is the end of the pass
        whole = total(newest.spans) == request.sizes[self._worker]
        few = len(here) <= self._few[lap] and lap not in self._under_way
        if whole and few and not request.last:
            self._wanted[lap] = replace(request, begins=False, most=self.most)
        else:
            self._wanted.pop(lap, None)
        return ticket
