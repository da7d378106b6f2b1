"""The worker's side of the conversation: requests as method calls.

A request blocks until its answer is there, but a push may be *offered*: the worker goes on with
what needs no parameters, and settles before anything that does. ``Stop`` may come at any time; it
is remembered and acted upon at the next boundary between mini-batches (``check_stop``), unless it
says that the answer will never come.
"""

from __future__ import annotations

import io
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hybridtrain.errors import UserError
from hybridtrain.memory import Arena, Layout, Packed
from hybridtrain.memory.lending import GetState, SharedState
from hybridtrain.memory.scratch_file import Scratch
from hybridtrain.monitoring.heartbeat import Heartbeat
from hybridtrain.protocol.messages import (
    Average,
    Averaged,
    Begin,
    Done,
    Draw,
    DrawnBatch,
    Gather,
    Gathered,
    Install,
    LoaderPass,
    Note,
    OptimizerState,
    Pull,
    Push,
    ReadStats,
    Refused,
    Released,
    Reply,
    Request,
    Share,
    Shared,
    Snapshot,
    Stats,
    Ticket,
    Writes,
)
from hybridtrain.protocol.notices import (
    Back,
    Gone,
    Progress,
    RequestProgress,
    SavePermission,
    Stop,
)
from hybridtrain.protocol.spans import Spans, total
from hybridtrain.worker.connection import Connection
from hybridtrain.worker.pending_push import PendingPush, Taking, Undoing


class StopRequested(KeyboardInterrupt):
    """The server wants this worker to end. Not an ``Exception``, so user code lets it through."""


class Client:
    """Speaks for one worker.

    Args:
        worker: its number.
        n_workers: W.
        line: to the server.
    """

    def __init__(self, worker: int, n_workers: int, line: Connection) -> None:
        self.worker, self.n_workers = worker, n_workers
        self.version = 0  # of the last release
        self.counted = True  # what was pushed, until somebody sets it anew
        self.solo = False  # the others have ended: meetings are with oneself
        self.save_permission: SavePermission | None = None  # once this worker has stopped
        self.is_saver = False  # does what one has to do for all, whoever it is
        self.heartbeat = Heartbeat()  # whether anybody watches is for the world to say
        self.joins = False  # training has begun long ago
        self.line = line
        self._pid = os.getpid()
        self.stop: Stop | None = None
        self._asked: dict[int, RequestProgress] = {}  # by whom it is for; not answered yet
        self.met: tuple[int, ...] = tuple(range(n_workers))  # in the last meeting
        self.offered: PendingPush | None = None  # and not settled
        self.gone: list[Gone] = []  # who will not come back
        self.left = False  # whether they left something of the shared queue
        self.away: set[int] = set()  # who will come back
        self.lost_at = 0  # updates when the last of them was lost
        self.on_change: Callable[[], object] = lambda: None  # somebody has gone, or is back
        self.tells: Callable[[], bytes] | None = None  # where training is
        # Done again and again while the server is waited for: returns in how many seconds to ask
        # it again, or ``None`` if there is nothing more to do.
        self.meanwhile: Callable[[], float | None] | None = None
        self._covers: list[DrawnBatch] = []
        self._next_draws: dict[LoaderPass, Draw] = {}  # to be answered with a release
        self._tickets: dict[LoaderPass, Ticket] = {}  # that came with one
        self.unseen: dict[LoaderPass, Spans] = {}  # of the shared queue, at the last snapshot

    # ---- parameters and steps -------------------------------------------------------------------

    def share(self, layout: Layout, averaging: bool = False) -> Arena:
        """Get the arena that holds the masters and the rows; waits for all workers."""
        reply, fd = self._ask(Share(layout, averaging), Shared)
        assert fd is not None, "the descriptor travels with the message"
        return Arena(fd, reply.n_bytes)

    def install(self, request: Install) -> None:
        """Hand the optimizers over; waits for all workers."""
        self._ask(request, Done)
        self.version = request.version

    def average(
        self, weight: float, absent: tuple[int, ...], packed: tuple[Packed, ...] = ()
    ) -> Averaged:
        """Have the gradient in the row averaged with all."""
        averaged: Averaged = self._ask(Average(weight, absent, packed), Averaged, True)[0]
        return averaged

    def offer(
        self, push: Push, then: Taking, undo: Undoing | None = None, settles: bool = True
    ) -> None:
        """Offer the gradient in the row; ``then`` is called once, with the release, by ``settle``.

        ``settles``: with it the mini-batches that were drawn so far are done.

        Until then neither the row nor the parameters belong to this worker. If the release never
        comes, ``undo`` is called instead.
        """
        self.settle()
        if settles:
            covers, self._covers = tuple(self._covers), []
            if not push.later:
                draws, self._next_draws = tuple(self._next_draws.values()), {}
                push = replace(push, draws=draws) if draws else push
            push = replace(push, covers=covers) if covers else push
        self.line.send(push)
        self.offered = PendingPush(then, [undo] if undo is not None else [], push.draws, push.later)

    def settle(self) -> None:
        """Wait for the release of what was offered, if that is still under way."""
        if self.offered is not None:
            offered, self.offered = self.offered, None
            offered.settle(self._give_up if offered.lost else self.await_release)

    @property
    def expected_version(self) -> int:
        """At least so many updates are behind the parameters once what is offered is released."""
        return self.version + (self.offered is not None)

    def await_release(self, then: Taking, draws: tuple[Draw, ...]) -> None:
        """It is under way: wait for it, and let ``then`` have it."""
        self._take(self._answer(Released, in_step=True)[0], then, draws)

    def _give_up(self, *_: Any) -> None:
        """The server has stopped instead of answering."""
        raise StopRequested

    def _take(self, released: Released | Refused, then: Taking, draws: tuple[Draw, ...]) -> None:
        if isinstance(released, Refused):
            raise UserError(released.reason)
        self._tickets |= {d.lap: t for d, t in zip(draws, released.tickets, strict=False)}
        self.version, self.counted = released.version, self.counted and released.counted
        if self.joins:  # from here on this worker is one of all
            self.joins = self.solo = False
        then(released)

    def push(self, push: Push) -> Released:
        """Offer the gradient in the row, and wait; returns the version to go on from."""
        released: list[Released] = []
        self.offer(push, released.append)
        self.settle()
        return released[0]

    def begin(self, writes: Writes) -> int:
        """Wait for this worker's turn; returns the version to begin from."""
        return self._ask(Begin(writes), Released, True)[0].version

    def cover(self, cover: DrawnBatch) -> None:
        """The next push stands for this mini-batch of the shared queue, too."""
        self._covers.append(cover)

    def pull(self, writes: Writes | None = None) -> int:
        """Bring the own parameters up to date; returns their version."""
        return self._ask(Pull(writes or {}), Released)[0].version

    def borrow(self, optimizer: int) -> SharedState:
        """Where the optimizer's state lies."""
        lent: SharedState = self._ask(GetState(optimizer), SharedState)[0]
        return lent

    def map_arena(self, number: int) -> Arena:
        """One of the arenas that the server lends."""
        reply, fd = self._ask(GetState(arena=number), Shared)
        assert fd is not None, "the descriptor travels with the message"
        return Arena(fd, reply.n_bytes)

    def draw(self, request: Draw) -> Ticket:
        """The next mini-batch of a pass, or its end. With the next push, the one after it is drawn.

        So a worker that needs one for each push has a conversation less; it has them no sooner than
        if it asked when its release has come.
        """
        if not self._computes_on:
            self.settle()
        if request.begins:  # of an earlier pass of the loader nothing is drawn any more
            for former in (self._tickets, self._next_draws):
                for lap in [lap for lap in former if lap.loader == request.lap.loader]:
                    del former[lap]
        ticket = self._tickets.pop(request.lap, None)
        if ticket is None:
            ticket = self._ask(request, Ticket, settles=not self._computes_on)[0]
        self._next_draws.pop(request.lap, None)
        if ticket.ahead and total(ticket.spans) == request.sizes[self.worker]:
            self._next_draws[request.lap] = replace(request, begins=False)
        return ticket

    # ---- reading --------------------------------------------------------------------------------

    def snapshot(self, refresh: bool = True) -> tuple[int, list[Any]]:
        """What each optimizer would save (:class:`hybridtrain.updates.Saved`), and its version.

        With ``refresh``, own parameters are brought to the same version.
        """
        scratch = Scratch()
        try:
            reply, _ = self._ask(Snapshot(refresh, scratch.path), OptimizerState)
            self.unseen = reply.unseen
            # From the parent over an inherited socket, so not a stranger's pickle.
            payload = io.BytesIO(reply.payload)
            saved = torch.load(payload, weights_only=False) if reply.payload else scratch.load()
        finally:
            scratch.close()
        return reply.version, saved

    def stats(self) -> dict[str, Any]:
        """See :meth:`hybridtrain.server.run_statistics.RunStatistics.stats`."""
        return self._ask(ReadStats(), Stats)[0].values

    # ---- meetings -------------------------------------------------------------------------------

    def gather(self, tag: str, item: Any, patient: bool = False, wish: bool = False) -> list[Any]:
        """Everybody's item, in the order of the workers; waits for all of them.

        But not for those who wait ``patient``ly somewhere else. For ``wish``, see ``Gather``.
        """
        if self.solo or self.n_workers == 1:
            return [item]
        payload = pickle.dumps(item, protocol=pickle.HIGHEST_PROTOCOL)
        reply, _ = self._ask(Gather(tag, payload, patient, wish), Gathered)
        self.met, self.left = reply.workers, reply.left
        return [pickle.loads(each) for each in reply.payloads]

    @property
    def there(self) -> tuple[int, ...]:
        """The workers that are there, or about to come back."""
        gone = {each.worker for each in self.gone}
        return tuple(worker for worker in range(self.n_workers) if worker not in gone)

    @property
    def rank(self) -> int:
        """This worker's place among those that are there."""
        return self.there.index(self.worker)

    @property
    def place(self) -> int:
        """Where this worker's item lies among those of the last meeting."""
        return 0 if self.solo else self.met.index(self.worker)

    @property
    def is_leader(self) -> bool:
        """Whether this worker does what one has to do for all: log, save, draw."""
        if self.is_saver or (not self.gone and not self.away):  # asked for many times in a step
            return self.is_saver or self.worker == 0
        return self.worker == next(each for each in self.there if each not in self.away)

    def note(self, note: Note) -> None:
        """Say something that needs no answer."""
        self.line.send(note)

    @property
    def forked(self) -> bool:
        """Whether this is not the worker, but a process that its user's code has forked from it."""
        return os.getpid() != self._pid

    # ---- stopping -------------------------------------------------------------------------------

    def check_stop(self) -> None:
        """At a boundary between mini-batches.

        Raises:
            StopRequested: if the server has asked for it.
        """
        if self.solo and not self.joins:  # who joins meets nobody yet, but can be stopped
            return
        if not self._computes_on:
            self.settle()
        while not self._must_stop and self.line.ready():
            self._hear(self.line.receive()[0])
        if self._must_stop:
            self.settle()  # others may have made the step that is under way
            raise StopRequested

    @property
    def _computes_on(self) -> bool:
        """Whether what was offered needs no release yet."""
        return self.offered is not None and self.offered.later

    @property
    def _must_stop(self) -> bool:
        return self.stop is not None and self.stop.behind is None

    def _ask(
        self, request: Request, kind: type[Any], in_step: bool = False, settles: bool = True
    ) -> tuple[Any, int | None]:
        if settles:
            self.settle()
        self.line.send(request)
        return self._answer(kind, in_step)

    def _answer(self, kind: type[Any], in_step: bool = False) -> tuple[Any, int | None]:
        while True:
            if self._asked and in_step:
                self._tell()
            if in_step and self.meanwhile is not None:
                while not self.line.ready() and (pause_s := self.meanwhile()) is not None:
                    time.sleep(pause_s)
            reply, fd = self.line.receive()
            match reply:
                case Stop(now=True) if kind is not Released and self._computes_on:
                    self._hear(reply)  # instead of the release: what was asked is still answered
                case Stop(now=True):
                    self.stop = reply
                    raise StopRequested
                case SavePermission():  # this worker has failed: nothing else will be answered
                    self.save_permission = reply
                    raise StopRequested
                case Stop() | Gone() | Back() | RequestProgress():
                    self._hear(reply)
                case Released() if kind is not Released:
                    self._hear(reply)
                case Refused(reason):
                    raise UserError(reason)
                case _:
                    assert isinstance(reply, kind), reply
                    return reply, fd

    def _hear(self, reply: Reply) -> None:
        """What comes unasked."""
        match reply:
            case Stop():
                self.stop = reply
                if reply.now and self.offered is not None:
                    self.offered.lost = True
            case Gone(worker, version, for_now):
                self.lost_at = version
                self.away |= {worker} if for_now else set()
                self.gone += [] if for_now else [reply]
                self.on_change()
            case Back(worker):
                self.away.discard(worker)
                self.on_change()
            case Released() | Refused():
                assert self.offered is not None, "it was waited for later"
                offered, self.offered = self.offered, None
                offered.settle(partial(self._take, reply))
            case _:
                assert isinstance(reply, RequestProgress), reply
                self._asked[reply.worker] = reply

    def _tell(self) -> None:
        """Now that this worker waits, in the middle of a step that is to be done again."""
        assert self.tells is not None, "who is asked trains"
        asked, self._asked = self._asked, {}
        payload = self.tells()
        for each in asked.values():
            self.line.send(Progress(each.worker, payload, each.question))
