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
from hybridtrain.protocol.spans import Spans
from hybridtrain.worker.connection import Connection
from hybridtrain.worker.crew import Crew
from hybridtrain.worker.own_steps import OwnSteps
from hybridtrain.worker.pending_push import PendingPush, Taking, Undoing
from hybridtrain.worker.tickets import Tickets


class StopRequested(KeyboardInterrupt):
    """The server wants this worker to end. Not an ``Exception``, so user code lets it through."""


class Client(Crew):
    """Speaks for one worker.

    Args:
        worker: its number.
        n_workers: W.
        line: to the server.
    """

    def __init__(self, worker: int, n_workers: int, line: Connection) -> None:
        super().__init__(worker, n_workers)
        self.version = 0  # of the last release
        self.counted = True  # what was pushed, until somebody sets it anew
        self.save_permission: SavePermission | None = None  # once this worker has stopped
        self.heartbeat = Heartbeat()  # whether anybody watches is for the world to say
        self.joins = False  # training has begun long ago
        self.line = line
        self._pid = os.getpid()
        self.stop: Stop | None = None
        self._asked: dict[int, RequestProgress] = {}  # by whom it is for; not answered yet
        self.offered: PendingPush | None = None  # and not settled
        self.tells: Callable[[], bytes] | None = None  # where training is
        # Done again and again while the server is waited for: returns in how many seconds to ask
        # it again, or ``None`` if there is nothing more to do.
        self.meanwhile: Callable[[], float | None] | None = None
        self._covers: list[DrawnBatch] = []
        self._tickets = Tickets(worker)
        self.own: OwnSteps | None = None  # where workers step the masters
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
            if not push.later and (draws := self._tickets.ask()):
                push = replace(push, draws=draws)
            push = replace(push, covers=covers) if covers else push
        self.line.send(push)
        undoing, n_covers = [undo] if undo is not None else [], len(push.covers)
        self.offered = PendingPush(then, undoing, push.draws, push.later, covers=n_covers)

    def settle(self) -> None:
        """Tell of all steps, and wait for the release of what is still under way."""
        if self.own is not None and self.own.untold:
            self._tell_steps(self.own)
        self._await_offered()

    def _await_offered(self) -> None:
        if self.offered is not None:
            offered, self.offered = self.offered, None
            offered.settle(self._give_up if offered.lost else self.await_release)

    @property
    def unsettled(self) -> PendingPush | None:
        """What was offered, if the parameters and their version depend on its release."""
        return None if self.offered is None or self.offered.made else self.offered

    @property
    def expected_version(self) -> int:
        """At least so many updates are behind the parameters once what is offered is released."""
        return self.version + (self.unsettled is not None)

    def await_release(self, then: Taking, push: PendingPush) -> None:
        """It is under way: wait for it, and let ``then`` have it."""
        self._take(self._answer(Released, in_step=True)[0], then, push)

    def _give_up(self, *_: Any) -> None:
        """The server has stopped instead of answering."""
        raise StopRequested

    def _take(self, released: Released | Refused, then: Taking, push: PendingPush) -> None:
        if isinstance(released, Refused):
            raise UserError(released.reason)
        for draw, ticket in zip(push.draws, released.tickets, strict=False):
            self._tickets.add(draw.lap, ticket)
        if not push.made:  # or the worker knows it better
            self.version, self.counted = released.version, self.counted and released.counted
        if self.joins:  # from here on this worker is one of all
            self.joins = self.solo = False
        then(released)
        if self.own is not None and not push.made:
            self.own.asked(push.covers if released.counted else 0)

    def make(self, step: Callable[[], object], push: Push, then: Taking) -> int:
        """Make a step on the masters, unasked; the server hears of it soon.

        Several are told of together: when mini-batches run short, when some time has passed, or
        before anything else is said. ``then`` is called with the answer.

        Returns:
            How many steps of all workers are behind the masters.
        """
        assert self.own is not None, "workers make steps"
        step()
        covers, self._covers = self._covers, []
        self.version = self.own.make(push, covers, then)
        if self._tickets.wanted or not self.own.may_wait:
            self._hear_all()
            if self.offered is None or self.own.must_tell:
                self._tell_steps(self.own)
        return self.version

    def _tell_steps(self, own: OwnSteps) -> None:
        self._await_offered()
        push, self.offered = own.tell(self._tickets.ask())
        self.line.send(push)

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

    def is_mixed(self) -> bool:
        """Whether the next push is for several loaders, whose order only this worker knows."""
        return len({cover.lap for cover in self._covers}) > 1

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
        if not self._computes_on or self._tickets.is_under_way(request.lap):
            self._await_offered()
        if request.begins:
            self._tickets.begin(request.lap)
        ticket = self._tickets.take(request)
        if ticket is None:
            found = self._ask(request, Ticket, settles=not self._computes_on)[0]
            self._tickets.add(request.lap, found)
            ticket = self._tickets.take(request)
            assert ticket is not None, "it has come"
        return ticket

    def draw_at_once(self, most: int) -> None:
        """Draw so many mini-batches together, as long as there are plenty."""
        self._tickets.most = most

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
            self._await_offered()
        self._hear_all()
        if self._must_stop:
            self.settle()  # others may have made the step that is under way
            raise StopRequested

    def _hear_all(self) -> None:
        """What has come so far."""
        while not self._must_stop and self.line.ready():
            self._hear(self.line.receive()[0])

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
            case Gone() | Back():
                self.hear_of(reply)
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
