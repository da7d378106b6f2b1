"""A worker's requests to the server, as method calls, and the messages that it receives.

A request blocks until its answer is there, but a push may be *offered*: the worker continues with
whatever needs no parameters, and settles before anything that does. ``Stop`` may arrive at any
time; the worker stops at the next boundary between mini-batches (``check_stop``), or at once if the
pending answer will never be sent.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from hybridtrain.engine.exchanges import Requirements
from hybridtrain.engine.memory import Arena, Layout, Store
from hybridtrain.engine.memory.arena import LentState, SharedState
from hybridtrain.engine.memory.scratch_file import Scratch, pickled, read
from hybridtrain.engine.monitoring.hang_detector import Heartbeat
from hybridtrain.engine.protocol.messages import (
    Average,
    Averaged,
    Back,
    Begin,
    Called,
    Claim,
    Claimed,
    Done,
    Draw,
    Gather,
    Gathered,
    GetState,
    Gone,
    Install,
    Lent,
    LoaderPass,
    Note,
    OptimizerState,
    Overtaken,
    Progress,
    Pull,
    Push,
    ReadStats,
    Refused,
    Released,
    Reply,
    Request,
    RequestProgress,
    SavePermission,
    ScheduleCall,
    Share,
    Shared,
    Snapshot,
    Stats,
    Stop,
    Ticket,
    Writes,
)
from hybridtrain.engine.protocol.spans import Spans
from hybridtrain.engine.server.shared_parameters import made_store
from hybridtrain.engine.worker.makers import made_maker
from hybridtrain.engine.worker.makers.borrowed_update import SteppedOptimizers
from hybridtrain.engine.worker.makers.in_place import AT_ONCE
from hybridtrain.engine.worker.makers.logged_steps import LoggedSteps
from hybridtrain.engine.worker.makers.maker import Maker
from hybridtrain.engine.worker.pending_push import PendingPush, Taking, Undoing
from hybridtrain.engine.worker.surroundings import Bells, Connection, Listeners
from hybridtrain.engine.worker.tickets import NotNeeded, Tickets
from hybridtrain.errors import UserError


class StopRequested(KeyboardInterrupt):
    """The server stops this worker. Not an ``Exception``, so user code does not catch it."""


class Client:
    """One worker's end of the protocol.

    Args:
        worker: its number.
        n_workers: W, of which some may be gone or restarting.
        line: to the server.
        apart: there are workers on other hosts, so that no file is shared with all of them.
        heartbeat: tells the world that it lives; the world decides whether it is watched.
        bells: wake the other workers; ``None``: no update is made in shared memory.
        log: of the updates that workers make, in a replay.
    """

    def __init__(
        self,
        worker: int,
        n_workers: int,
        line: Connection,
        apart: bool = False,
        heartbeat: Heartbeat | None = None,
        bells: Bells | None = None,
        log: LoggedSteps | None = None,
    ) -> None:
        self.worker, self.n_workers, self.line, self.apart = worker, n_workers, line, apart
        self.heartbeat, self.bells, self._log = heartbeat or Heartbeat(), bells, log
        self.listeners = Listeners()
        self.solo = False  # the others have ended: a meeting has one participant
        self.is_saver = False  # acts as the leader, whatever its number
        self.met: tuple[int, ...] = tuple(range(n_workers))  # in the last meeting
        self.gone: list[Gone] = []  # for good
        self.left = False  # lost workers left mini-batches in the queue
        self.away: set[int] = set()  # to be restarted
        self.lost_at = 0  # version at the last loss
        self.joins = False  # restarted, and without a step so far
        self.has_stepped = False  # in this process
        # Parameters and pushes.
        self.version = 0  # of this worker's parameters
        self.counted = True  # the pushes since user code has begun to count
        self.offered: PendingPush | None = None
        self.maker = Maker()  # until parameters are shared
        self._arenas: dict[int, Arena] = {}  # lent by the server
        # Data.
        self.unseen: dict[LoaderPass, Spans] = {}  # of the shared queue, at the last snapshot
        self.snapshot_counts: dict[str, int] = {}  # updates, samples of this run at that moment
        self.tickets = Tickets(worker)
        self._schedule_calls: list[ScheduleCall] = []  # of learning-rate schedules, not sent yet
        self.has_called = False  # from then on the server makes each update
        self.stop: Stop | None = None
        self._permission: SavePermission | None = None  # received after this worker's stop
        self._asked: dict[int, RequestProgress] = {}  # unanswered, by the worker to be restarted

    # ---- which workers train --------------------------------------------------------------------

    @property
    def there(self) -> tuple[int, ...]:
        """The workers that train or will be restarted."""
        gone = {each.worker for each in self.gone}
        return tuple(worker for worker in range(self.n_workers) if worker not in gone)

    @property
    def is_whole(self) -> bool:
        """Whether all workers of the start train."""
        return not (self.gone or self.away or self.solo or self.joins)

    @property
    def place(self) -> int:
        """The index of this worker's item among those of the last meeting."""
        return 0 if self.solo else self.met.index(self.worker)

    @property
    def is_leader(self) -> bool:
        """Whether this worker logs, saves and draws for all."""
        if self.is_saver or (not self.gone and not self.away):  # read many times in a step
            return self.is_saver or self.worker == 0
        return self.worker == next(each for each in self.there if each not in self.away)

    def count_pushes(self) -> None:
        """Begin anew: :attr:`counted` is false once a push is dropped."""
        self.counted = True

    def reach(self, version: int) -> None:
        """User code has written the parameters: they count as those of this version."""
        self.version = version

    def go_alone(self) -> None:
        """The others have ended, or are not to be waited for."""
        self.solo = True

    def rejoin(self, joined: bool = False) -> None:
        """Restarted: this worker makes its first step alone. ``joined``: it needs none."""
        self.joins = self.solo = not joined

    def fail(self) -> None:
        """This worker has failed: leave what it has begun to the server."""
        self.maker.forget()
        if self.offered is None or self.offered.unsent is None:
            return
        if (left := self.maker.leave(self.offered.unsent, self.version + 1)) is not None:
            self.offered.is_sent()
            self._send_push(left)

    def await_permission(self) -> Mapping[int, bytes] | None:
        """In a stopped worker: if it is to save, what the workers have left for the checkpoint."""
        reply: Any = self._permission
        while not isinstance(reply, SavePermission):
            reply = self.line.receive()[0]  # may be the reply to an earlier request
        self.is_saver = reply.saves  # and so the leader
        return reply.left if reply.saves else None

    # ---- parameters and steps -------------------------------------------------------------------

    def map(self, request: Share | GetState) -> Arena:
        """Map shared memory: that of masters and rows, or an arena that the server lends."""
        reply, fd = self._ask(request, Shared)
        assert fd is not None, "the descriptor travels with the message"
        return Arena(fd, reply.n_bytes)

    def shared_store(
        self,
        layout: Layout,
        needs: Requirements,
        stepped: SteppedOptimizers,
        averaging: bool = False,
        worker_updates: bool = True,
    ) -> Store:
        """Map the shared memory, and choose the maker of updates; waits for all workers.

        Args:
            layout: the places of the parameters.
            needs: what policy and exchange require.
            stepped: returns the optimizers, each with the slot numbers of its parameters.
            averaging: add a row for the mean of the gradients.
            worker_updates: the module permits updates that workers make themselves.
        """
        worker_updates = worker_updates and self.bells is not None
        arena = self.map(Share(layout, averaging, worker_updates))
        store = made_store(layout, self.n_workers, needs, averaging, arena, worker_updates)
        parts = (self.bells, self._log, stepped, self._borrow_flat, self.stats)
        self.maker = made_maker(self.worker, store, *parts)
        return store

    def install(self, request: Install) -> None:
        """Send the optimizers; waits for all workers."""
        self._ask(request, Done)
        self.version = request.version
        self.maker.begin(request.last)

    def average(self, request: Average) -> Averaged:
        """Request the mean of all workers' gradients; this one's lies in its row."""
        return self._ask(request, Averaged, True)[0]

    def offer(
        self, push: Push, then: Taking, undo: Undoing | None = None, settles: bool = True
    ) -> None:
        """Push the gradient in the row; ``settle`` calls ``then`` once, with the release.

        ``settles``: the push covers the mini-batches drawn so far.

        Until then this worker may use neither the row nor the parameters. If the release never
        arrives, ``undo`` is called instead.
        """
        if settles and self._makes(push, then):
            return
        self.settle()
        if settles:
            covers = tuple(self.tickets.pop_covers())
            if push.waits and (draws := self.tickets.ask()):
                push = replace(push, draws=draws)
            push = replace(push, covers=covers) if covers else push
        undoing, n_covers = [undo] if undo is not None else [], len(push.covers)
        came = self.maker.come(push, self.version + 1, self.is_whole)
        if not came:
            self._send_push(push)
        args = (then, undoing, push.draws, not push.waits, n_covers)
        self.offered = PendingPush(*args, unsent=push if came else None)

    def make(self, step: Callable[[], object], push: Push, then: Taking) -> int:
        """Step the masters without asking the server, and report it later.

        Several steps are reported together: when few mini-batches are left, after some time, or
        before any other message. ``then`` is called with the answer.

        Returns:
            The number of steps of all workers.
        """
        step()
        self.version = self.maker.count(push, self.tickets.pop_covers(), then)
        self.has_stepped = True
        self._report_if_due()
        return self.version

    @property
    def must_ask(self) -> bool:
        """Whether only the server can make the next step."""
        return self.has_called or self.tickets.is_mixed

    def _makes(self, push: Push, then: Taking) -> bool:
        """Make the update of this push alone, if possible; returns whether it was."""
        if not self.maker.makes_alone or self.must_ask:
            return False
        if self.unsettled is not None:  # until then the row and the parameters are in use
            self._await_offered()
        version = self.maker.make(push, self.tickets.pop_covers)
        if version is None:
            return False
        self.version, self.has_stepped = version, True
        self.tickets.draw_at_once(AT_ONCE)
        self._report_if_due()
        then(Released(self.version))
        return True

    def push(self, push: Push) -> Released:
        """Push the gradient in the row, and wait for the release."""
        released: list[Released] = []
        self.offer(push, released.append)
        self.settle()
        return released[0]

    def begin(self, writes: Writes) -> int:
        """Wait for this worker's turn; returns the version to begin from."""
        self.version = self._ask(Begin(writes), Released, True)[0].version
        return self.version

    def pull(self, writes: Writes | None = None, alike: bool = False) -> int:
        """Update this worker's parameters; returns their version."""
        self.version = self._ask(Pull(writes or {}, alike), Released)[0].version
        self.maker.read(self.version)
        return self.version

    def borrow(self, optimizer: int) -> SharedState:
        """The places of the optimizer's state."""
        return self._ask(GetState(optimizer), SharedState)[0]

    def _borrow_flat(self, optimizer: int) -> tuple[LentState, dict[int, Arena]] | None:
        """The places of the flat update's state, and its arenas, if workers may step it."""
        lent: LentState | None = self._ask(GetState(optimizer, flat=True), Lent)[0].state
        if lent is None:
            return None
        for number in lent.arenas - self._arenas.keys():
            self._arenas[number] = self.map(GetState(arena=number))
        return lent, self._arenas

    # ---- mini-batches of the shared queue --------------------------------------------------------

    def draw(self, request: Draw) -> Ticket:
        """The next mini-batch of a pass, or its end. The next push requests the one after it.

        That saves a round trip for each mini-batch; the worker still gets its mini-batch no sooner
        than if it asked after its release.
        """
        if not self._computes_on or self.tickets.is_under_way(request.lap):
            self._await_offered()
        if request.begins:
            self.tickets.begin(request.lap)
        ticket = self.tickets.take(request)
        if ticket is None:
            found = self._ask(request, Ticket, settles=not self._computes_on)[0]
            self.tickets.add(request.lap, found)
            ticket = self.tickets.take(request)
            assert ticket is not None, "it was added"
        return ticket

    def claim(self) -> bool:
        """Training has processed its last mini-batch; whether no other worker has before."""
        if newest := self.tickets.covers[-1:]:
            self.counted = self.tickets.keep(self._ask(Claim(newest[0]), Claimed)[0].counts)
        return self.counted

    def check_need(self) -> None:
        """Raises ``NotNeeded`` if another worker has processed training's last mini-batch."""
        self._receive_all()
        if self.tickets.is_overtaken:
            raise NotNeeded

    # ---- reading and meeting --------------------------------------------------------------------

    def snapshot(self, refresh: bool = True) -> tuple[int, list[Any]]:
        """The version, and what each optimizer would save
        (:class:`hybridtrain.engine.updates.SavedOptimizer`).

        With ``refresh``, this worker's parameters are updated to the same version.
        """
        with closing(Scratch(self.apart)) as scratch:
            reply, _ = self._ask(Snapshot(refresh, scratch.path), OptimizerState)
            self.unseen = reply.unseen
            self.snapshot_counts = {"updates": reply.updates, "samples": reply.samples}
            if refresh:
                self.version = reply.version
                self.maker.read(reply.version)
            return reply.version, read(scratch.path, reply.payload)

    def stats(self) -> dict[str, Any]:
        """See :meth:`hybridtrain.engine.server.run_statistics.RunStatistics.stats`."""
        self.settle()
        self.line.send(ReadStats())  # alone: when it is sent depends on clocks, and is not recorded
        return self._answer(Stats)[0].values

    def gather(self, tag: str, item: Any, **kind: Any) -> list[Any]:
        """Exchange items with all workers; returns them in the order of the workers.

        For the ``kind`` of meeting, see ``Gather``.
        """
        if self.solo or self.n_workers == 1:
            return [item]
        request = Gather(tag, pickled(item), **kind)
        while (reply := self._ask(request, Gathered)[0]).join:
            self.listeners.come(reply.join)
        self.met, self.left = reply.workers, reply.left
        # From another worker, over inherited sockets and between hosts over authenticated ones.
        return [pickle.loads(each) for each in reply.payloads]

    def note(self, note: Note) -> None:
        """Send a message that has no answer."""
        self.line.send(note)
        self.maker.log.noted()

    def call(self, call: ScheduleCall) -> None:
        """Record a call of a learning-rate schedule, which is sent before the next message."""
        self._schedule_calls.append(call)
        self.has_called = True

    # ---- releases -------------------------------------------------------------------------------

    def settle(self) -> None:
        """Report all steps, and wait for the release of an offered push."""
        if self.maker.untold and self.maker.log.tells(due=True):
            self._report_steps(())
        self._await_offered()

    def _await_offered(self) -> None:
        if self.offered is not None:
            offered, self.offered = self.offered, None
            lost = offered.lost and offered.unsent is None  # a push that was not sent is not lost
            offered.settle(self._give_up if lost else self.await_release)

    def _give_up(self, *_: Any) -> None:
        """The server has stopped instead of answering."""
        raise StopRequested

    @property
    def unsettled(self) -> PendingPush | None:
        """The offered push, if the parameters and their version depend on its release."""
        return None if self.offered is None or self.offered.made else self.offered

    @property
    def expected_version(self) -> int:
        """The least version of the parameters after the release of an offered push."""
        return self.version + (self.unsettled is not None)

    def await_release(self, then: Taking, push: PendingPush) -> None:
        """Wait for the release of an offered push; profiles time this."""
        released, number = None, self.version + 1
        if push.unsent is not None:
            left = self.maker.wait(push.unsent, number, self._disturbed)
            if left is None:
                released = Released(number)
            else:
                self._send_push(left)
        self._take(released or self._answer(Released, in_step=True)[0], then, push)

    def _disturbed(self) -> bool:
        """Receive all notices; returns whether one of them ends the shared round."""
        while self.stop is None and self.line.ready():
            self._receive(self.line.receive()[0])
        return self.stop is not None or not self.is_whole

    def _send_push(self, push: Push) -> None:
        """Let the server make this round."""
        self._send_schedule_calls()
        self._send_owed(made=False)
        self.line.send(push)

    def _send_owed(self, made: bool) -> None:
        """In a message of its own: the push of a step that is aborted has no effect."""
        if (owed := self.maker.owed(made)) is not None:
            self.line.send(owed)

    def _send_schedule_calls(self) -> None:
        if self._schedule_calls:
            calls, self._schedule_calls = self._schedule_calls, []
            self.line.send(Called(tuple(calls)))

    def _take(self, released: Released | Refused, then: Taking, push: PendingPush) -> None:
        if isinstance(released, Refused):
            raise UserError(released.reason)
        for draw, ticket in zip(push.draws, released.tickets, strict=False):
            self.tickets.add(draw.lap, ticket)
        if not push.made:  # else this worker knows a newer version
            self.version, self.counted = released.version, self.counted and released.counted
            self.has_stepped = True
        if self.joins:  # its first step has ended
            self.joins = self.solo = False
        then(released)
        if not push.made:
            self.maker.asked(push.covers if released.counted else 0, released.version)

    def _report_if_due(self) -> None:
        maker = self.maker
        if self.tickets.wanted or maker.log.tells(due=not maker.may_wait):
            self._receive_all()
            if self.offered is None or maker.must_tell:
                self._report_steps(self.tickets.ask())
            if maker.log.awaits:  # a replay repeats which mini-batches were drawn by then
                self._await_offered()

    def _report_steps(self, draws: tuple[Draw, ...]) -> None:
        self._await_offered()
        self._send_schedule_calls()
        push, self.offered = self.maker.tell(draws)
        self.line.send(push)

    # ---- stopping -------------------------------------------------------------------------------

    def check_stop(self) -> None:
        """Stop if the server has asked for it; called between mini-batches.

        Raises:
            StopRequested: if so.
        """
        if self.solo and not self.joins:  # a joining worker meets no other yet, but can be stopped
            return
        if not self._computes_on:
            self._await_offered()
        self._receive_all()
        if self._must_stop:
            self.settle()  # other workers may have made the step of the offered push
            raise StopRequested

    @property
    def _computes_on(self) -> bool:
        """Whether the offered push needs no release yet."""
        return self.offered is not None and self.offered.later

    @property
    def _must_stop(self) -> bool:
        return self.stop is not None and self.stop.behind is None

    # ---- messages -------------------------------------------------------------------------------

    def _ask(
        self, request: Request, kind: type[Any], in_step: bool = False, settles: bool = True
    ) -> tuple[Any, int | None]:
        if settles:
            self.settle()
        self._send_schedule_calls()
        self._send_owed(made=True)
        self.line.send(request)
        return self._answer(kind, in_step)

    def _answer(self, kind: type[Any], in_step: bool = False) -> tuple[Any, int | None]:
        while True:
            if self._asked and in_step:
                self._report_progress()
            if in_step and (meanwhile := self.listeners.meanwhile) is not None:
                while not self.line.ready() and (pause_s := meanwhile()) is not None:
                    time.sleep(pause_s)
            reply, fd = self.line.receive()
            match reply:
                case Stop(now=True) if kind is not Released and self._computes_on:
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
                    self.maker.log.goes_on()
                    return reply, fd

    def _receive_all(self) -> None:
        while not self._must_stop and self.line.ready():
            self._receive(self.line.receive()[0])

    def _receive(self, reply: Reply) -> None:
        """Act on a notice, or on the release of a push that is settled later."""
        match reply:
            case Stop():
                self.stop = reply
                if reply.now and self.offered is not None:
                    self.offered.lose()
            case Gone(worker, version, for_now):
                self.lost_at = version
                self.away |= {worker} if for_now else set()
                self.gone = [*self._gone_but(worker), *([] if for_now else [reply])]
                self.listeners.change()
            case Back(worker):
                self.away -= {worker}
                self.gone = self._gone_but(worker)
                self.listeners.change()
            case Overtaken(batch):
                self.tickets.overtaken.add(batch)
            case Called(calls):
                self.listeners.calls(calls)
            case Released() | Refused():
                assert self.offered is not None, "it is settled later"
                offered, self.offered = self.offered, None
                offered.settle(partial(self._take, reply))
            case _:
                assert isinstance(reply, RequestProgress), reply
                self._asked[reply.worker] = reply

    def _gone_but(self, worker: int) -> list[Gone]:
        return [each for each in self.gone if each.worker != worker]

    def _report_progress(self) -> None:
        """This worker waits in a step, which a restarted worker repeats."""
        assert self.listeners.tell is not None, "a worker that is asked trains"
        asked, self._asked = self._asked, {}
        payload = self.listeners.tell()
        for each in asked.values():
            self.line.send(Progress(each.worker, payload, each.question))
