"""A worker's requests to the server, as method calls; each waits for its answer."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from hybridtrain.exchanges import Requirements
from hybridtrain.memory import Arena, Layout, Packed, Store
from hybridtrain.memory.lending import GetState, Lent, LentState, SharedState
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
    Released,
    Share,
    Shared,
    Snapshot,
    Stats,
    Ticket,
    Writes,
)
from hybridtrain.protocol.spans import Spans
from hybridtrain.server.shared_parameters import made_store
from hybridtrain.worker.connection import Connection
from hybridtrain.worker.conversation import Conversation, StopRequested
from hybridtrain.worker.own_updates.borrowed_update import Stepped
from hybridtrain.worker.own_updates.one_by_one import OwnUpdates
from hybridtrain.worker.own_updates.own_steps import AT_ONCE, OwnSteps
from hybridtrain.worker.own_updates.round_maker import Bells, RoundMaker
from hybridtrain.worker.pending_push import PendingPush, Taking, Undoing

__all__ = ["Client", "StopRequested"]


class Client(Conversation):
    """Speaks for one worker.

    Args:
        worker: its number.
        n_workers: W.
        line: to the server.
    """

    def __init__(self, worker: int, n_workers: int, line: Connection) -> None:
        super().__init__(worker, n_workers, line)
        self.heartbeat = Heartbeat()  # whether anybody watches is for the world to say
        self.bells: Bells | None = None  # where workers may meet in shared memory
        self._covers: list[DrawnBatch] = []
        self._arenas: dict[int, Arena] = {}  # of what is lent
        # Called to a round, or a meeting, this worker does this, and waits patiently again.
        self.called: Callable[[str], object] = lambda to: None
        self.unseen: dict[LoaderPass, Spans] = {}  # of the shared queue, at the last snapshot

    # ---- parameters and steps -------------------------------------------------------------------

    def share(self, layout: Layout, averaging: bool = False) -> Arena:
        """Get the arena that holds the masters and the rows; waits for all workers."""
        reply, fd = self._ask(Share(layout, averaging, self.bells is not None), Shared)
        assert fd is not None, "the descriptor travels with the message"
        return Arena(fd, reply.n_bytes)

    def shared_store(
        self, layout: Layout, requirements: Requirements, averaging: bool = False
    ) -> Store:
        """As :meth:`share`, with all that lies in the arena."""
        arena, meets = self.share(layout, averaging), self.bells is not None
        return made_store(layout, self.n_workers, requirements, averaging, arena, meets)

    def install(self, request: Install) -> None:
        """Hand the optimizers over; waits for all workers."""
        self._ask(request, Done)
        self.version = request.version
        if self.maker is not None:
            self.maker.borrowed.begin()
        if self.updates is not None:
            self.updates.begin(request.last)

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
        if settles and self._makes(push, then):
            return
        self.settle()
        if settles:
            covers, self._covers = tuple(self._covers), []
            if not push.later and (draws := self._tickets.ask()):
                push = replace(push, draws=draws)
            push = replace(push, covers=covers) if covers else push
        undoing, n_covers = [undo] if undo is not None else [], len(push.covers)
        pending = PendingPush(then, undoing, push.draws, push.later, covers=n_covers)
        if self.maker is not None and self.maker.come(push, self.version + 1, self.is_whole):
            pending.met = push
        else:
            self.send_push(push)
        self.offered = pending

    def make(self, step: Callable[[], object], push: Push, then: Taking) -> int:
        """Make a step on the masters, unasked; the server hears of it soon.

        Several are told of together: when mini-batches run short, when some time has passed, or
        before anything else is said. ``then`` is called with the answer.

        Returns:
            How many steps of all workers are behind the masters.
        """
        assert self.own is not None, "workers make steps"
        step()
        self._count(self.own, push, then)
        self.tell_soon(self.own)
        return self.version

    def _count(self, own: OwnSteps, push: Push, then: Taking) -> None:
        covers, self._covers = self._covers, []
        self.version = own.make(push, covers, then)

    def _makes(self, push: Push, then: Taking) -> bool:
        """Whether this worker has made the update itself, at its turn."""
        own = self.own
        if self.updates is None or own is None or self.has_called or self.is_mixed():
            return False
        if self.unsettled is not None:  # the row and the parameters are not this worker's yet
            self._await_offered()
        if not self.updates.make(push, lambda: self._count(own, push, _nothing)):
            return False
        self._tickets.most = AT_ONCE
        self.tell_soon(own)
        then(Released(self.version))
        return True

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
        version: int = self._ask(Pull(writes or {}), Released)[0].version
        if self.own is not None:
            self.own.read(version)
        return version

    def borrow(self, optimizer: int) -> SharedState:
        """Where the optimizer's state lies."""
        lent: SharedState = self._ask(GetState(optimizer), SharedState)[0]
        return lent

    def meet(self, store: Store, optimizers: Stepped) -> None:
        """Make updates without the server, in shared memory, where that can be."""
        lent = store, optimizers, self._borrow_flat
        self.maker = RoundMaker.of(self.worker, self.bells, *lent)
        self.updates = OwnUpdates.of(self.worker, *lent)

    def _borrow_flat(self, optimizer: int) -> tuple[LentState, dict[int, Arena]] | None:
        """Where the state of the flat pass lies, and its memory, if it is lent."""
        lent: LentState | None = self._ask(GetState(optimizer, flat=True), Lent)[0].state
        if lent is None:
            return None
        for number in lent.arenas - self._arenas.keys():
            self._arenas[number] = self.map_arena(number)
        return lent, self._arenas

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
            if refresh and self.own is not None:
                self.own.read(reply.version)
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

    def gather(
        self, tag: str, item: Any, patient: bool = False, wish: bool = False, calls: bool = False
    ) -> list[Any]:
        """Everybody's item, in the order of the workers; waits for all of them.

        But not for those who wait ``patient``ly somewhere else, unless it ``calls`` them. For
        ``wish``, see ``Gather``.
        """
        if self.solo or self.n_workers == 1:
            return [item]
        payload = pickle.dumps(item, protocol=pickle.HIGHEST_PROTOCOL)
        request = Gather(tag, payload, patient, wish, calls)
        while (reply := self._ask(request, Gathered)[0]).call:
            self.called(reply.call)
        self.met, self.left = reply.workers, reply.left
        return [pickle.loads(each) for each in reply.payloads]

    def note(self, note: Note) -> None:
        """Say something that needs no answer."""
        self.line.send(note)


def _nothing(released: Released) -> None:
    """The server has heard of updates that this worker has made, and knows the outcome of."""
