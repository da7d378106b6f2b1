"""Worker processes on this host: started, served and supervised by this one.

Theory of operation. The parent starts W workers, each with one end of a socket pair, and then does
three things in one loop: it carries messages between the workers and the server, it watches the
processes (a dead one is seen within milliseconds), and it reacts to signals.
What follows when a worker fails or dies is the judge's decision. Either it is the beginning of the
end, as a signal is: everybody is asked to stop, given ``grace_s`` seconds (none, if another signal
comes), and then killed. Or the others go on without it, or another process takes its place. No
process outlives ``run``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from selectors import BaseSelector, DefaultSelector
from typing import Any

from hybridtrain.arrivals import Arrived
from hybridtrain.failures import End, GoOn, Judge, Left, OnFailure, Replace
from hybridtrain.messages import Described, Paused, Resumed, Shared, Stopped
from hybridtrain.news import Saved, Stop, Told
from hybridtrain.rounds import Replies
from hybridtrain.serving import Serving
from hybridtrain.worlds.channel import Channel, ChannelClosed, channel_pair
from hybridtrain.worlds.child import Birth, Body, run_worker
from hybridtrain.worlds.comebacks import Comebacks
from hybridtrain.worlds.crew import WorkerProcess
from hybridtrain.worlds.inheritance import Inheritance
from hybridtrain.worlds.nursery import Nursery
from hybridtrain.worlds.outcome import Failed, Finished, WorkerDied, in_words
from hybridtrain.worlds.placement import one_thread, stand_aside
from hybridtrain.worlds.signals import Interrupted, caught_signals
from hybridtrain.worlds.watchman import Watchman, to_stderr

Again = Callable[[bytes, int], Body]

_POLL_S = 1.0
_SAME_SIGNAL_S = 1.0  # repeated sooner, it is the same: timeout(1) sends each twice


@dataclass
class ProcessWorld:
    """Runs one job on W worker processes.

    Args:
        server: decides; used from this thread only.
        n_workers: W.
        start_method: ``fork``, ``spawn`` or ``forkserver``.
        threads_per_worker: torch threads of each worker.
        grace_s: how long workers may take to stop before they are killed.
        judge: decides what follows from a failure.
        watchman: finds workers that hang.
        places: the device of each worker, in words.
    """

    server: Serving
    n_workers: int
    start_method: str = "fork"
    threads_per_worker: int = 1
    grace_s: float = 30.0
    judge: Judge = field(default_factory=lambda: Judge(OnFailure()))
    watchman: Watchman = field(default_factory=Watchman)
    places: Sequence[str] = ()
    _workers: list[WorkerProcess] = field(default_factory=list)
    _failure: BaseException | None = None
    _deadline_s: float | None = None
    _signals: list[int] = field(default_factory=list)
    _look_at_s: float = 0.0  # when to see next who shares a core
    _backs: Comebacks = field(default_factory=Comebacks)
    _last: Inheritance = field(default_factory=Inheritance)

    def run(self, body: Body, again: Again | None = None) -> list[Any]:
        """Run ``body(client)`` in every worker; the results in the order of the workers.

        Args:
            body: what workers do.
            again: what a worker does that is restarted, by what is told of where training is, and
                how many updates there have been.

        Raises:
            Interrupted: if SIGINT or SIGTERM ended the run.
            BaseException: what the first failing worker raised, with its traceback as a note.
        """
        self._nursery, self._again = Nursery(self.start_method), again
        with DefaultSelector() as selector, caught_signals(self._signals, selector), one_thread():
            try:
                self._start(range(self.n_workers), body, selector)
                while self._backs or not all(worker.gone for worker in self._workers):
                    self._turn(selector)
            finally:
                self._kill_all()
                for worker in self._workers:
                    worker.close()
                self._nursery.close()
                self.server.close()
        if self._failure is not None:
            raise self._failure
        self.watchman.conclude()
        return [worker.result for worker in self._workers]

    # ---- start and end --------------------------------------------------------------------------

    def _start(self, numbers: Sequence[int], body: Body, selector: BaseSelector) -> None:
        pairs = {number: channel_pair() for number in numbers}
        lines = [worker.channel.sock for worker in self._workers if worker.number not in pairs]
        parent = None if self.start_method == "forkserver" else os.getpid()
        births = [Birth(n, self.n_workers, self.threads_per_worker, parent) for n in numbers]
        forked = self.start_method == "fork"
        rows = [each.arguments(body, pairs, lines if forked else None) for each in births]
        try:
            processes = self._nursery.start(run_worker, rows)
        except BaseException:
            for ours, _ in pairs.values():
                ours.close()
            raise
        finally:
            for _, theirs in pairs.values():
                theirs.close()
        for number, process in zip(numbers, processes, strict=True):
            place = self.places[number] if self.places else ""
            worker = WorkerProcess.of(number, Channel(pairs[number][0]), process, place)
            self._workers[number : number + 1] = [worker]
            worker.attend(selector)

    def _kill_all(self) -> None:
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.process.join()

    # ---- one turn of the loop -------------------------------------------------------------------

    def _turn(self, selector: BaseSelector) -> None:
        for key, _ in selector.select(self._timeout_s()):
            kind, worker = key.data
            if kind == "message":
                self._listen(worker, selector)
            elif kind == "exit":
                self._reap(worker, selector)
            elif kind == "room":
                worker.make_room()
            else:
                os.read(key.fd, 64)
        wake_at_s = self.server.wake_at_s
        if wake_at_s is not None and time.monotonic() >= wake_at_s:
            self._send(self.server.wake())
        self._react_to_signals()
        self._call_back(selector)
        self._look()
        if self._deadline_s is not None:
            left_s = self._deadline_s - time.monotonic()
            self._send(self._last.decide(self._workers, late=left_s < self.grace_s / 2))
            if left_s < 0:
                self._kill_all()

    def _look(self) -> None:
        """Now and then: the scheduler moves processes about; workers may hang."""
        if (now_s := time.monotonic()) > self._look_at_s:
            self._look_at_s = now_s + _POLL_S
            stand_aside(worker.pid for worker in self._workers if not worker.gone)
        if self._deadline_s is None and now_s >= self.watchman.due_s:
            there = [worker for worker in self._workers if not worker.gone and not worker.cause]
            self.watchman.look(now_s, there)

    def _timeout_s(self) -> float:
        next_s = self.watchman.due_s if self._deadline_s is None else self._deadline_s
        times = (next_s, self.server.wake_at_s, self._backs.next_s)
        due_s = [at_s for at_s in times if at_s is not None]
        return min([_POLL_S, *(max(0.0, at_s - time.monotonic()) for at_s in due_s)])

    def _listen(self, worker: WorkerProcess, selector: BaseSelector) -> None:
        if worker.channel not in selector.get_map():
            return  # it has been closed, or its process reaped, since the selector saw something
        try:
            for message in worker.channel.messages():
                worker.heard += 1
                self._take(worker, message)
        except ChannelClosed:
            selector.unregister(worker.channel)  # its sentinel will tell the rest

    def _take(self, worker: WorkerProcess, message: Any) -> None:
        match message:
            case Finished(result):
                worker.result, worker.ended = result, True
                self._send(self.server.finished(worker.number))
            case Failed():
                worker.ended = True
                self._fail(worker, message.rebuild(worker.number, worker.place))
                if message.waits:
                    self._send(self._last.failed(worker.number, self._deadline_s is not None))
            case Told(number, payload):
                self._hear_where(number, payload)
            case Saved(well):
                self._last.saved(well)
            case Paused() | Resumed() | Stopped() | Described() | Arrived():
                if isinstance(message, Stopped) and not worker.ended:
                    worker.ended = True
                    self._last.stopped(worker.number)
                self._send(self.server.note(worker.number, message))
            case _:
                worker.request = message
                self._send(self.server.handle(worker.number, message))

    def _send(self, replies: Replies) -> None:
        if self.server.failure is not None and self._failure is None:
            self._failure = self.server.failure
            self._ask_to_stop()
        for number, reply in replies:
            store, fd = self.server.store, None
            if isinstance(reply, Shared) and store is not None:
                fd = store.descriptor(reply.lent)
            self._workers[number].send(reply, fd)

    def _reap(self, worker: WorkerProcess, selector: BaseSelector) -> None:
        self._listen(worker, selector)  # its last words
        if worker.channel in selector.get_map():  # its own children may hold the line open
            selector.unregister(worker.channel)
        selector.unregister(worker.sentinel)
        worker.bury()
        self._last.lost(worker.number)
        if not worker.ended:
            self._fail(worker, WorkerDied(worker.obituary()))
        if not worker.mourned:
            self._send(self.server.lost(worker.number))

    # ---- the beginning of the end ---------------------------------------------------------------

    def _fail(self, worker: WorkerProcess, error: BaseException) -> None:
        """What follows is the judge's decision, if training has begun and is to go on."""
        there = sum(not w.ended and not w.gone for w in self._workers if w is not worker)
        left = Left(there, bool(self._backs.kept))
        decides = self.server.training and self._deadline_s is None
        now_s = time.monotonic()
        match self.judge.failed(worker.number, error, left, now_s) if decides else End():
            case GoOn():
                to_stderr(f"{in_words(error)}; the others go on without it{worker.aftermath()}")
                worker.mourned = True
                self._send(self.server.leave(worker.number))
            case Replace(delay_s, number):
                to_stderr(
                    f"{in_words(error)}; restart {number}, in {delay_s:g} s{worker.aftermath()}"
                )
                worker.mourned = True
                self._backs.expect(worker.number, now_s + delay_s)
                self._send(self.server.miss(worker.number))
            case End(reason):
                if reason:
                    error.add_note(f"The run ends, because {reason}.")
                self._give_up(worker, error)

    def _give_up(self, worker: WorkerProcess, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        self._ask_to_stop()
        self._send(self.server.note(worker.number, Stopped(broke=True)))

    # ---- coming back ----------------------------------------------------------------------------

    def _call_back(self, selector: BaseSelector) -> None:
        """Those whose time has come are called; those for whom somebody has told are started."""
        backs, staff = self._backs, self.server.staff
        others = [worker for worker in self._workers if worker.number not in backs]
        if others and all(worker.ended or worker.gone for worker in others):
            backs.clear()  # training is over
        for number in backs.called(time.monotonic()):
            staff.call(number)
            self._send(staff.ask())
        gone = {worker.number for worker in self._workers if worker.gone}
        first = backs.first(staff.rounds.pushed) if len(gone) == len(self._workers) else None
        if first is not None and backs.kept:
            self._hear_where(first, backs.kept)
        for number, told in backs.ready(gone):
            assert self._again is not None, "who restarts workers says what they do"
            self._workers[number].close()
            self._start([number], self._again(told, staff.ledger.version), selector)

    def _hear_where(self, number: int | None, told: bytes) -> None:
        if number is None:
            self._backs.kept = told
        else:
            self._backs.hear(number, told)
            self.server.staff.back(number)  # whoever meets from now on waits for it

    def _ask_to_stop(self) -> None:
        if self._deadline_s is None:
            self._deadline_s = time.monotonic() + self.grace_s
            self._backs.clear()
            self._send([(w.number, Stop()) for w in self._workers if not w.ended])

    def _react_to_signals(self) -> None:
        while self._signals:
            signum = self._signals.pop(0)
            if self._deadline_s is None:
                self._failure = Interrupted(signum)
                self._ask_to_stop()
            elif time.monotonic() > self._deadline_s - self.grace_s + _SAME_SIGNAL_S:
                self._deadline_s = 0.0  # asked again: at once
