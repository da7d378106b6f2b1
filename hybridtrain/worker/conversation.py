"""What a worker hears: answers, releases that are still under way, and what comes unasked.

A request blocks until its answer is there, but a push may be *offered*: the worker goes on with
what needs no parameters, and settles before anything that does. ``Stop`` may come at any time; it
is remembered and acted upon at the next boundary between mini-batches (``check_stop``), unless it
says that the answer will never come.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from hybridtrain.errors import UserError
from hybridtrain.protocol.messages import Changed, Push, Refused, Released, Reply, Request
from hybridtrain.protocol.notices import (
    Back,
    Called,
    Gone,
    Progress,
    RequestProgress,
    SavePermission,
    ScheduleCall,
    Stop,
)
from hybridtrain.worker.connection import Connection
from hybridtrain.worker.crew import Crew
from hybridtrain.worker.own_updates.one_by_one import OwnUpdates
from hybridtrain.worker.own_updates.own_steps import OwnSteps
from hybridtrain.worker.own_updates.round_maker import PATIENCE_S, RoundMaker
from hybridtrain.worker.pending_push import PendingPush, Taking
from hybridtrain.worker.tickets import Tickets


class StopRequested(KeyboardInterrupt):
    """The server wants this worker to end. Not an ``Exception``, so user code lets it through."""


class Conversation(Crew):
    """Of one worker with the server.

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
        self.line = line
        self.stop: Stop | None = None
        self._asked: dict[int, RequestProgress] = {}  # by whom it is for; not answered yet
        self.offered: PendingPush | None = None  # and not settled
        self.tells: Callable[[], bytes] | None = None  # where training is
        # Done again and again while the server is waited for: returns in how many seconds to ask
        # it again, or ``None`` if there is nothing more to do.
        self.meanwhile: Callable[[], float | None] | None = None
        self._tickets = Tickets(worker)
        self.own: OwnSteps | None = None  # where workers step the masters
        self.maker: RoundMaker | None = None  # where the last of all makes the update
        self.updates: OwnUpdates | None = None  # where each makes its own, one by one
        self._calls: list[ScheduleCall] = []  # of this worker; the server does not know them yet
        self.has_called = False  # whether it has made any: then each update goes by the server
        self.take_calls: Callable[[tuple[ScheduleCall, ...]], object] = lambda calls: None

    # ---- releases -------------------------------------------------------------------------------

    def settle(self) -> None:
        """Tell of all steps, and wait for the release of what is still under way."""
        if self.own is not None and self.own.untold:
            self._tell_steps(self.own)
        self._await_offered()

    def _await_offered(self) -> None:
        if self.offered is not None:
            offered, self.offered = self.offered, None
            lost = offered.lost and offered.met is None  # what was not sent is not lost
            offered.settle(self._give_up if lost else self.await_release)

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
        if push.met is not None and self._meets(push.met):
            self._take(Released(self.version + 1), then, push)
        else:
            self._take(self._answer(Released, in_step=True)[0], then, push)

    def _meets(self, push: Push) -> bool:
        """Wait for the round that this worker has come to; without one the push is sent now."""
        assert self.maker is not None, "it has come"
        maker, number = self.maker, self.version + 1
        until_s = time.monotonic() + PATIENCE_S
        while not maker.shared.is_made(number):
            if maker.shared.is_off(number):
                break
            if time.monotonic() > until_s or self._disturbed():
                with suppress(BlockingIOError):
                    if maker.leave(number, waits=False):
                        break
            maker.bells.wait(PATIENCE_S)
        else:
            return True
        self.send_push(push)
        return False

    def hand_in(self) -> None:
        """This worker is about to leave: what it has offered is to count as if it had been sent."""
        offered, maker = self.offered, self.maker
        if offered is None or offered.met is None or maker is None:
            return
        if maker.leave(self.version + 1):
            push, offered.met = offered.met, None
            self.send_push(push)

    def _disturbed(self) -> bool:
        """Hear what has come unasked; whether the server has something to say about this round."""
        while self.stop is None and self.line.ready():
            self._hear(self.line.receive()[0])
        return self.stop is not None or not self.is_whole

    def send_push(self, push: Push) -> None:
        """The server is to make this round."""
        self._tell_calls()
        self._tell_owed(made=False)
        self.line.send(push)

    def _tell_owed(self, made: bool) -> None:
        """Apart from any push: that of a step which is broken off has no effect."""
        maker = self.maker
        if maker is not None and (owed := maker.owed(made)) is not None:
            self.line.send(Changed(maker.optimizer, owed))

    def call(self, call: ScheduleCall) -> None:
        """This worker has called a learning-rate schedule: the server hears of it with the next
        message.
        """
        self._calls.append(call)
        self.has_called = True

    def _tell_calls(self) -> None:
        if self._calls:
            calls, self._calls = self._calls, []
            self.line.send(Called(tuple(calls)))

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
            self.own.asked(push.covers if released.counted else 0, released.version)

    def tell_soon(self, own: OwnSteps) -> None:
        """Of the steps that were made, if it is time: several are told of together."""
        if self._tickets.wanted or not own.may_wait:
            self._hear_all()
            if self.offered is None or own.must_tell:
                self._tell_steps(own)

    def _tell_steps(self, own: OwnSteps) -> None:
        self._await_offered()
        self._tell_calls()
        push, self.offered = own.tell(self._tickets.ask())
        self.line.send(push)

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
        self._tell_calls()
        self._tell_owed(made=True)
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
                case Stop() | Gone() | Back() | Called() | RequestProgress():
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
            case Called(calls):
                self.take_calls(calls)
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
