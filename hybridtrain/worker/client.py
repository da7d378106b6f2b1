"""A worker's requests to the server, as method calls, and the messages that it receives.

A request blocks until its answer is there, but a push may be *offered*: the worker continues with
whatever needs no parameters, and settles before anything that does. ``Stop`` may arrive at any
time; the worker stops at the next boundary between mini-batches (``check_stop``), or at once if the
pending answer will never be sent.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from hybridtrain.errors import UserError
from hybridtrain.exchanges import Requirements
from hybridtrain.memory import Arena, Layout, Store, UpdateMaker
from hybridtrain.memory.arena import LentState, SharedState
from hybridtrain.memory.scratch_file import Scratch, read
from hybridtrain.monitoring.hang_detector import Heartbeat
from hybridtrain.protocol.messages import (
    Average,
    Averaged,
    Back,
    Begin,
    Called,
    Changed,
    Changes,
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
from hybridtrain.protocol.spans import Spans
from hybridtrain.server.shared_parameters import made_store, round_of, step_log_of
from hybridtrain.worker.own_updates.borrowed_update import BorrowedUpdate, SteppedOptimizers
from hybridtrain.worker.own_updates.logged_steps import LoggedSteps, StepWriter
from hybridtrain.worker.own_updates.one_by_one import OwnUpdates
from hybridtrain.worker.own_updates.own_steps import AT_ONCE, OwnSteps
from hybridtrain.worker.own_updates.round_maker import Bells, RoundMaker
from hybridtrain.worker.pending_push import PendingPush, Taking, Undoing
from hybridtrain.worker.tickets import NotNeeded, Tickets


class StopRequested(KeyboardInterrupt):
    """The server stops this worker. Not an ``Exception``, so user code does not catch it."""


class Connection(Protocol):
    """Carries messages between a client and its server."""

    def send(self, message: Any) -> None:
        """Send a request, a note, or the end of the worker."""
        ...

    def receive(self) -> tuple[Reply, int | None]:
        """Wait for the next reply; returns it with the descriptor sent beside it."""
        ...

    def ready(self) -> bool:
        """Whether ``receive`` would return at once."""
        ...


class Client:
    """One worker's end of the protocol.

    Args:
        worker: its number.
        n_workers: W, of which some may be gone or restarting.
        line: to the server.
        apart: there are workers on other hosts, so that no file is shared with all of them.
    """

    def __init__(self, worker: int, n_workers: int, line: Connection, apart: bool = False) -> None:
        self.worker, self.n_workers, self.line, self.apart = worker, n_workers, line, apart
        self.heartbeat = Heartbeat()  # the world decides whether it is watched
        self.solo = False  # the others have ended: a meeting has one participant
        self.is_saver = False  # acts as the leader, whatever its number
        self.met: tuple[int, ...] = tuple(range(n_workers))  # in the last meeting
        self.gone: list[Gone] = []  # for good
        self.left = False  # lost workers left mini-batches in the queue
        self.away: set[int] = set()  # to be restarted
        self.lost_at = 0  # version at the last loss
        self.joins = False  # restarted, and without a step so far
        self.has_stepped = False  # in this process
        self.on_change: Callable[[], object] = lambda: None  # a worker is gone or back
        # Parameters and pushes.
        self.version = 0  # of the last release
        self.counted = True  # the pushes since user code has set it
        self.offered: PendingPush | None = None
        self.bells: Bells | None = None  # set where workers may meet in shared memory
        self.own: OwnSteps | None = None  # set where workers step the masters
        self.maker: RoundMaker | None = None  # set where the last worker makes the update
        self.updates: OwnUpdates | None = None  # set where workers make updates one by one
        self.log: LoggedSteps | None = None  # set where such a run is recorded or replayed
        self._arenas: dict[int, Arena] = {}  # lent by the server
        # Called repeatedly while this worker waits for its release; returns the seconds until the
        # next call, or ``None`` if it has nothing more to do.
        self.meanwhile: Callable[[], float | None] | None = None
        # Data.
        self.unseen: dict[LoaderPass, Spans] = {}  # of the shared queue, at the last snapshot
        self.snapshot_counts: dict[str, int] = {}  # updates, samples of this run at that moment
        self.tickets = Tickets(worker)
        self._calls: list[ScheduleCall] = []  # of learning-rate schedules, not sent yet
        self.has_called = False  # from then on the server makes each update
        self.take_calls: Callable[[tuple[ScheduleCall, ...]], object] = lambda calls: None
        # A patient worker called to a round or a meeting joins it by this, then waits again.
        self.called: Callable[[str], object] = lambda to: None
        self.stop: Stop | None = None
        self.save_permission: SavePermission | None = None  # received after this worker's stop
        self.tells: Callable[[], bytes] | None = None  # makes a progress report
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

    # ---- parameters and steps -------------------------------------------------------------------

    def share(self, layout: Layout, averaging: bool = False, meets: bool = False) -> Arena:
        """Map the arena of masters and rows; waits for all workers."""
        return self._mapped(Share(layout, averaging, meets))

    def _mapped(self, request: Share | GetState) -> Arena:
        reply, fd = self._ask(request, Shared)
        assert fd is not None, "the descriptor travels with the message"
        return Arena(fd, reply.n_bytes)

    def shared_store(
        self, layout: Layout, needs: Requirements, averaging: bool = False, meets: bool = True
    ) -> Store:
        """Map the shared memory; ``meets``: the module permits updates without the server."""
        meets = meets and self.bells is not None
        arena = self.share(layout, averaging, meets)
        return made_store(layout, self.n_workers, needs, averaging, arena, meets)

    def install(self, request: Install) -> None:
        """Send the optimizers; waits for all workers."""
        self._ask(request, Done)
        self.version = request.version
        if self.maker is not None:
            self.maker.borrowed.begin()
        if self.updates is not None:
            self.updates.begin(request.last)

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
        pending = PendingPush(then, undoing, push.draws, not push.waits, covers=n_covers)
        if self.maker is not None and self.maker.come(push, self.version + 1, self.is_whole):
            pending.met = push
        else:
            self._send_push(push)
        self.offered = pending

    def make(self, step: Callable[[], object], push: Push, then: Taking) -> int:
        """Step the masters without asking the server, and report it later.

        Several steps are reported together: when few mini-batches are left, after some time, or
        before any other message. ``then`` is called with the answer.

        Returns:
            The number of steps of all workers.
        """
        assert self.own is not None, "workers make steps"
        step()
        self._count(self.own, push, then)
        self._report_if_due(self.own)
        return self.version

    def _count(self, own: OwnSteps, push: Push, then: Taking) -> None:
        self.version, self.has_stepped = own.make(push, self.tickets.pop_covers(), then), True

    def _makes(self, push: Push, then: Taking) -> bool:
        """Make the update of this push one by one, if possible; returns whether it was."""
        own = self.own
        if self.updates is None or own is None or self.has_called or self.tickets.is_mixed:
            return False
        if self.unsettled is not None:  # until then the row and the parameters are in use
            self._await_offered()
        if not self.updates.make(push, lambda: self._count(own, push, lambda released: None)):
            return False
        self.tickets.draw_at_once(AT_ONCE)
        self._report_if_due(own)
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
        return self._ask(Begin(writes), Released, True)[0].version

    def pull(self, writes: Writes | None = None) -> int:
        """Update this worker's parameters; returns their version."""
        version: int = self._ask(Pull(writes or {}), Released)[0].version
        if self.own is not None:
            self.own.read(version)
        return version

    def meet(self, store: Store, optimizers: SteppedOptimizers) -> None:
        """Make updates without the server from now on, if :attr:`Store.maker` says so."""
        self.maker = self.updates = None
        if not store.maker.borrows:
            return
        borrowed = BorrowedUpdate(store, optimizers, self._borrow_flat)
        if self.log is None and (log := step_log_of(store)).is_on:
            self.log = StepWriter(self.worker, store, log, self.stats)
        if store.maker is UpdateMaker.ONE_BY_ONE:
            self.updates = OwnUpdates(self.worker, store, borrowed, self.log)
        elif self.bells is not None:
            self.maker = RoundMaker(self.worker, round_of(store), self.bells, borrowed, self.log)

    def borrow(self, optimizer: int) -> SharedState:
        """The places of the optimizer's state."""
        lent: SharedState = self._ask(GetState(optimizer), SharedState)[0]
        return lent

    def _borrow_flat(self, optimizer: int) -> tuple[LentState, dict[int, Arena]] | None:
        """The places of the flat update's state, and its arenas, if workers may step it."""
        lent: LentState | None = self._ask(GetState(optimizer, flat=True), Lent)[0].state
        if lent is None:
            return None
        for number in lent.arenas - self._arenas.keys():
            self._arenas[number] = self.map_arena(number)
        return lent, self._arenas

    def map_arena(self, number: int) -> Arena:
        """Map one of the arenas that the server lends."""
        return self._mapped(GetState(arena=number))

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
        newest = self.tickets.covers[-1:]
        return not newest or self.tickets.keep(self._ask(Claim(newest[0]), Claimed)[0].counts)

    def check_need(self) -> None:
        """Raises ``NotNeeded`` if another worker has processed training's last mini-batch."""
        self._receive_all()
        if self.tickets.is_overtaken:
            raise NotNeeded

    # ---- reading and meeting --------------------------------------------------------------------

    def snapshot(self, refresh: bool = True) -> tuple[int, list[Any]]:
        """The version, and what each optimizer would save (:class:`hybridtrain.updates.Saved`).

        With ``refresh``, this worker's parameters are updated to the same version.
        """
        scratch = Scratch(self.apart)
        try:
            reply, _ = self._ask(Snapshot(refresh, scratch.path), OptimizerState)
            self.unseen = reply.unseen
            self.snapshot_counts = {"updates": reply.updates, "samples": reply.samples}
            if refresh and self.own is not None:
                self.own.read(reply.version)
            saved = read(scratch.path, reply.payload)
        finally:
            scratch.close()
        return reply.version, saved

    def stats(self) -> dict[str, Any]:
        """See :meth:`hybridtrain.server.run_statistics.RunStatistics.stats`."""
        return self._ask(ReadStats(), Stats)[0].values

    def gather(
        self, tag: str, item: Any, patient: bool = False, wish: bool = False, calls: bool = False
    ) -> list[Any]:
        """Exchange items with all workers; returns them in the order of the workers.

        Waits for all but ``patient`` workers in another meeting, which it ``calls`` on request.
        For ``wish``, see ``Gather``.
        """
        if self.solo or self.n_workers == 1:
            return [item]
        payload = pickle.dumps(item, protocol=pickle.HIGHEST_PROTOCOL)
        request = Gather(tag, payload, patient, wish, calls)
        while (reply := self._ask(request, Gathered)[0]).call:
            self.called(reply.call)
        self.met, self.left = reply.workers, reply.left
        # From another worker by way of the parent, over inherited sockets.
        return [pickle.loads(each) for each in reply.payloads]

    def note(self, note: Note) -> None:
        """Send a message that has no answer."""
        self.line.send(note)
        if self.log is not None:
            self.log.noted()

    def call(self, call: ScheduleCall) -> None:
        """Record a call of a learning-rate schedule, which is sent before the next message."""
        self._calls.append(call)
        self.has_called = True

    # ---- releases -------------------------------------------------------------------------------

    def settle(self) -> None:
        """Report all steps, and wait for the release of an offered push."""
        if self.own is not None and self.own.untold and self._reports(due=True):
            self._report_steps(self.own, ())
        self._await_offered()

    def _await_offered(self) -> None:
        if self.offered is not None:
            offered, self.offered = self.offered, None
            lost = offered.lost and offered.met is None  # a push that was not sent is not lost
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
        if push.met is not None and self.maker is not None:
            if self.maker.is_made(number, self._disturbed):
                released = Released(number)
            else:
                self._send_push(self.maker.left(push.met))
        self._take(released or self._answer(Released, in_step=True)[0], then, push)

    def hand_in(self) -> None:
        """This worker is about to stop: send the push with which it waits in a shared round."""
        offered, maker = self.offered, self.maker
        if offered is None or offered.met is None or maker is None:
            return
        if maker.leave(self.version + 1):
            push, offered.met = offered.met, None
            self._send_push(maker.left(push))

    def _disturbed(self) -> bool:
        """Receive all notices; returns whether one of them ends the shared round."""
        while self.stop is None and self.line.ready():
            self._receive(self.line.receive()[0])
        return self.stop is not None or not self.is_whole

    def _send_push(self, push: Push) -> None:
        """Let the server make this round."""
        self._send_calls()
        self._send_owed(made=False)
        self.line.send(push)

    def _send_owed(self, made: bool) -> None:
        """In a message of its own: the push of a step that is aborted has no effect."""
        maker = self.maker
        if maker is not None and (owed := maker.owed(made)) is not None:
            self.line.send(Changed(maker.optimizer, Changes(owed)))

    def _send_calls(self) -> None:
        if self._calls:
            calls, self._calls = self._calls, []
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
        if self.own is not None and not push.made:
            self.own.asked(push.covers if released.counted else 0, released.version)

    def _report_if_due(self, own: OwnSteps) -> None:
        if self.tickets.wanted or self._reports(due=not own.may_wait):
            self._receive_all()
            if self.offered is None or own.must_tell:
                self._report_steps(own, self.tickets.ask())
            if self.log is not None:  # a replay repeats which mini-batches were drawn by then
                self._await_offered()

    def _reports(self, due: bool) -> bool:
        """Whether to report steps now, which a replay does only where the run did."""
        return due if self.log is None else self.log.tells(due)

    def _report_steps(self, own: OwnSteps, draws: tuple[Draw, ...]) -> None:
        self._await_offered()
        self._send_calls()
        push, self.offered = own.tell(draws)
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
        self._send_calls()
        self._send_owed(made=True)
        self.line.send(request)
        return self._answer(kind, in_step)

    def _answer(self, kind: type[Any], in_step: bool = False) -> tuple[Any, int | None]:
        while True:
            if self._asked and in_step:
                self._report_progress()
            if in_step and self.meanwhile is not None:
                while not self.line.ready() and (pause_s := self.meanwhile()) is not None:
                    time.sleep(pause_s)
            reply, fd = self.line.receive()
            match reply:
                case Stop(now=True) if kind is not Released and self._computes_on:
                    self._receive(reply)  # it replaces the release: the request is still answered
                case Stop(now=True):
                    self.stop = reply
                    raise StopRequested
                case SavePermission():  # this worker has failed: no other answer will follow
                    self.save_permission = reply
                    raise StopRequested
                case Stop() | Gone() | Back() | Overtaken() | Called() | RequestProgress():
                    self._receive(reply)
                case Released() if kind is not Released:
                    self._receive(reply)
                case Refused(reason):
                    raise UserError(reason)
                case _:
                    assert isinstance(reply, kind), reply
                    if self.log is not None:
                        self.log.goes_on()
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
                    self.offered.lost = True
            case Gone(worker, version, for_now):
                self.lost_at = version
                self.away |= {worker} if for_now else set()
                self.gone += [] if for_now else [reply]
                self.on_change()
            case Back(worker):
                self.away -= {worker}
                self.gone = [x for x in self.gone if x.worker != worker]
                self.on_change()
            case Overtaken(batch):
                self.tickets.overtaken.add(batch)
            case Called(calls):
                self.take_calls(calls)
            case Released() | Refused():
                assert self.offered is not None, "it is settled later"
                offered, self.offered = self.offered, None
                offered.settle(partial(self._take, reply))
            case _:
                assert isinstance(reply, RequestProgress), reply
                self._asked[reply.worker] = reply

    def _report_progress(self) -> None:
        """This worker waits in a step, which a restarted worker repeats."""
        assert self.tells is not None, "a worker that is asked trains"
        asked, self._asked = self._asked, {}
        payload = self.tells()
        for each in asked.values():
            self.line.send(Progress(each.worker, payload, each.question))
