"""Starts, serves and supervises worker processes, on this host and on others.

Theory of operation. The parent starts W workers, each with one end of a socket pair, and then runs
one loop: it passes messages between workers and server, detects dead processes (within
milliseconds), and handles signals. When a worker fails or dies the judge decides. Either the run
ends, as on a signal: all workers are asked to stop, and killed after ``grace_s`` seconds (or at a
second signal). Or the others continue without it, or it is restarted. The roster tracks the state
of each worker and which one writes the last checkpoint, and returns the actions to execute
(:mod:`hybridtrain.engine.recovery.roster`). No process outlives ``run``.
Workers of other hosts are started and watched there by a relay, and served here like all others
(:mod:`hybridtrain.hosts`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from selectors import BaseSelector, DefaultSelector
from typing import Any

from hybridtrain.engine.monitoring.hang_detector import Standstill
from hybridtrain.engine.monitoring.watchdog import Watchdog, is_stopped, to_stderr
from hybridtrain.engine.protocol.events import (
    BrokenOff,
    Completed,
    Event,
    Looked,
    Received,
    Removed,
    Restarted,
    TimerExpired,
    UpdateDue,
)
from hybridtrain.engine.protocol.messages import (
    NOTES,
    PUSHES,
    Average,
    Begin,
    Gather,
    Install,
    Progress,
    RequestProgress,
    Saved,
    SavePermission,
    Share,
    Stop,
    Stopped,
)
from hybridtrain.engine.recovery.failure_policy import End, GoOn, Judge, OnFailure, Replace
from hybridtrain.engine.recovery.roster import (
    AWAY,
    THERE,
    Act,
    Ask,
    BreakOff,
    GiveUp,
    Kill,
    KillAll,
    LifecycleEvent,
    PermitSave,
    Roster,
    Say,
    Start,
    WorkerState,
)
from hybridtrain.engine.server.refusals import standing
from hybridtrain.engine.server.rounds import Replies
from hybridtrain.engine.server.server import ParameterServer
from hybridtrain.engine.worlds.cpu_scheduling import one_thread, stand_aside
from hybridtrain.engine.worlds.other_hosts import OtherHosts, StartsWorkers
from hybridtrain.engine.worlds.signals import Interrupted, caught_signals
from hybridtrain.engine.worlds.start_workers import (
    RestartPoint,
    WorkerHandle,
    WorkerProcess,
    WorkerStarter,
)
from hybridtrain.engine.worlds.worker_exit import (
    Failed,
    Finished,
    WorkerDied,
    WorkerError,
    in_words,
)
from hybridtrain.engine.worlds.worker_main import Body
from hybridtrain.errors import AT_LIMIT, UserError

Again = Callable[[bytes, int], Body]

_POLL_S = 1.0
_STOPPED_S = 1.0  # within an update, which takes milliseconds
_EVENTS = dict.fromkeys((*PUSHES, Average, Begin), LifecycleEvent.WAITS)
_EVENTS |= dict.fromkeys((Gather, Share, Install), LifecycleEvent.MEETS)
_ANEW = ", and all begin anew: no worker had told where training is"
_SAME_SIGNAL_S = 1.0  # a repetition within this time is ignored: timeout(1) sends signals twice


class BeginAnew(BaseException):
    """All workers were lost before any reported its progress: run again after ``delay_s``."""

    def __init__(self, delay_s: float) -> None:
        super().__init__("all workers are lost")
        self.delay_s = delay_s


@dataclass
class ProcessWorld:
    """Runs one job on W worker processes.

    Args:
        server: used from this thread only.
        n_workers: W.
        start_method: ``fork``, ``spawn`` or ``forkserver``.
        threads_per_worker: torch threads of each worker.
        grace_s: time for workers to stop before they are killed.
        judge: decides after a failure.
        watchdog: finds workers that hang.
        device_names: of each worker, in words.
        worker_updates: workers may make updates in shared memory, without the server.
        others: the other hosts of the run, if there are any.
    """

    server: ParameterServer
    n_workers: int
    start_method: str = "fork"
    threads_per_worker: int = 1
    grace_s: float = 30.0
    judge: Judge = field(default_factory=lambda: Judge(OnFailure()))
    watchdog: Watchdog = field(default_factory=Watchdog)
    device_names: Sequence[str] = ()
    worker_updates: bool = False
    others: OtherHosts | None = None
    _failure: BaseException | None = None
    _left: dict[int, bytes] = field(default_factory=dict)  # by stopped workers, for a checkpoint
    _signals: list[int] = field(default_factory=list)
    _look_at_s: float = 0.0  # time of the next check
    _standstill: Standstill = field(default_factory=Standstill)

    def run(self, body: Body, again: Again | None = None) -> list[Any]:
        """Run ``body(client)`` in every worker; the results in the order of the workers.

        Args:
            body: the workers' function.
            again: makes that of a restarted worker, from another's progress and the number of
                updates.

        Raises:
            Interrupted: if a signal ended the run.
            BeginAnew: if the run must restart from its beginning.
            BaseException: of the first failing worker, with its traceback as a note.
        """
        self.roster = Roster(self.n_workers, self.judge, self.grace_s)
        self._starter = self._made_starter(body, again)
        self.server.membership.queue.count_by(self._covered)
        self.server.workers_updates.free_by(self._free)
        with DefaultSelector() as selector, caught_signals(self._signals, selector), one_thread():
            try:
                self._start(selector)
                while not self.roster.over:
                    self._turn(selector)
            finally:
                self._starter.kill()
                self._starter.close()
                # Break the reference cycle between server and world.
                self.server.membership.queue.count_by(None)
                self.server.workers_updates.free_by(lambda pid, for_s: None)
                self.server.close()
        results = [worker.result for worker in self._starter.workers]
        if self._signals and isinstance(self._failure, BeginAnew):  # one that came just now
            self._failure = Interrupted(self._signals[0])
        if isinstance(self._failure, Interrupted):
            self._failure = Interrupted(self._failure.signum, results)
        if self._failure is not None:
            raise self._failure
        self.watchdog.conclude()
        return results

    def _made_starter(self, body: Body, again: Again | None) -> StartsWorkers:
        def bodies(restart: RestartPoint | None) -> Body:
            if restart is None:
                return body
            assert again is not None, "restarts need a body"
            return again(*restart)

        here = WorkerStarter(
            self.n_workers,
            self.start_method,
            self.threads_per_worker,
            bodies,
            self.device_names,
            self.worker_updates,
            apart=self.others is not None,
        )
        return here if self.others is None else self.others.beside(here, self.server)

    def _start(self, selector: BaseSelector) -> None:
        waits = self.server.requirements.whole_rounds and not self.judge.chosen.joins
        absent = set() if waits else self._absent()
        there = [worker for worker in range(self.n_workers) if worker not in absent]
        try:
            self._starter.start(there, selector)
        except BlockingIOError as error:
            raise UserError(f"{len(there)} workers cannot be started: {AT_LIMIT}") from error
        for worker in absent:
            self.roster.reaped(worker)
            self._on(Removed(worker, announced=True))

    def _absent(self) -> set[int]:
        return set() if self.others is None else self.others.absent()

    def _covered(self, worker: int) -> int:
        """Mini-batches that the worker has processed without the server."""
        store = self.server.store
        counts = None if store is None else store.step_counts
        return 0 if counts is None else counts.covered(worker)

    def _free(self, pid: int, for_s: float) -> None:
        """Kill a stopped process (SIGSTOP) that has held the update lock for so long.

        A slow process, or one in a debugger, keeps the lock, unless the run ends.
        """
        ends = self.roster.ending or bool(self._signals)
        if for_s >= min(_STOPPED_S, self.grace_s / 4) and (ends or is_stopped(pid)):
            for worker in running(self._starter.workers):
                if worker.pid == pid:
                    worker.kill("was stopped in the middle of an update, and killed")

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
            elif kind == "host":
                for number, ended in worker.listen():
                    react = self._reap if ended else self._listen
                    react(self._starter.workers[number], selector)
            else:
                os.read(key.fd, 64)
        wake_at_s = self.server.wake_at_s
        if wake_at_s is not None and time.monotonic() >= wake_at_s:
            self._on(TimerExpired())
        if self.others is not None:
            self._signals += self.others.take_signals()
        self._react_to_signals()
        roster = self.roster
        if roster.ending or roster.away:
            membership = self.server.membership
            not_yet = {*membership.rounds.pushed, *membership.coming, *self._absent()}
            self._do(roster.advance(time.monotonic(), not_yet), selector)
        self._look()
        if self.others is not None:
            self.others.flush()
            if (announced := self.others.arriving()) is not None:
                self._on(announced)

    def _look(self) -> None:
        """Once a second, choose the server's core and check for standstill; check for hangs."""
        if (now_s := time.monotonic()) > self._look_at_s:
            self._look_at_s = now_s + _POLL_S
            if self.others is not None:
                admits = self.server.training and not self.roster.ending
                members = self.server.membership.members
                for worker in self.others.look(now_s, admits):
                    self.roster.comes(worker)
                    if self.server.requirements.whole_rounds and worker not in members:
                        self._on(Removed(worker, returns=True))
                self._lose_comers()
            if self.worker_updates:
                self._on(Looked())
            stand_aside(each.pid for each in running(self._starter.workers))
            self._look_for_standstill(now_s)
        if not self.roster.ending and now_s >= self.watchdog.due_s:
            there = [each for each in running(self._starter.workers) if not each.cause]
            self.watchdog.look(now_s, there)

    def _lose_comers(self) -> None:
        """The host of workers that were about to begin is lost again: their places are vacant."""
        membership, continues = self.server.membership, self.judge.chosen.choice == "continue"
        for worker in self._absent() & {*self.roster.those(WorkerState.CALLED)}:
            if continues or worker in membership.coming:
                self.roster.leave(worker)
                self._on(Removed(worker, announced=worker in membership.members))

    def _look_for_standstill(self, now_s: float) -> None:
        """End the run if all workers wait, no timer runs, and no worker is about to return."""
        roster, workers = self.roster, self._starter.workers
        due = self.server.wake_at_s is not None or any(at_s > now_s for at_s in roster.next_s())
        due |= not self._absent().isdisjoint(roster.those(*AWAY))  # a host may come back
        stands = not (roster.ending or due) and all(each.gone or each.asked for each in workers)
        heard = sum(each.heard for each in workers)
        if self._standstill.look(now_s, stands, heard, roster.telling):
            who = {each.number: each.asked for each in workers if not each.gone}
            self._failure = WorkerError(standing(self._standstill.for_s, who, roster.those(*AWAY)))
            self._end()
            self._on(BrokenOff())

    def _timeout_s(self) -> float:
        times = [self.server.wake_at_s, None if self.roster.ending else self.watchdog.due_s]
        if self.roster.ending or self.roster.away:
            times += self.roster.next_s()
        due_s = [at_s for at_s in times if at_s is not None]
        return min([_POLL_S, *(max(0.0, at_s - time.monotonic()) for at_s in due_s)])

    def _listen(self, worker: WorkerHandle, selector: BaseSelector) -> None:
        for message in worker.messages():
            worker.hear()
            self._take(worker, message, selector)

    def _take(self, worker: WorkerHandle, message: Any, selector: BaseSelector) -> None:
        roster, number = self.roster, worker.number
        match message:
            case Finished(result, first):
                worker.finish(result)
                roster.finished(number, first)
                self._on(Completed(number))
            case Failed():
                self._left[number] = message.left
                worker.ask(None)
                self._fail(worker, message.rebuild(number, worker.location), message.waits)
            case Progress(whom, payload, question):
                self._do(roster.progress(number, whom, question, payload), selector)
            case Saved(well):
                roster.saved(number, well)
            case Stopped():
                self._left[number] = message.left
                self._do(roster.stopped(number), selector)
                self._on(Received(number, message))
            case _:
                if not isinstance(message, NOTES):
                    worker.ask(message)
                    if (event := _EVENTS.get(type(message))) is not None:
                        roster.on(number, event)
                self._on(Received(number, message))

    def _on(self, event: Event) -> None:
        self._send(self.server.on(event))
        while self.server.update_is_due:
            if self.others is not None:
                self.others.flush()
            self._send(self.server.on(UpdateDue()))
            if self.others is not None:
                self.others.tell_of_update()

    def _send(self, replies: Replies) -> None:
        if self.server.failure is not None and self._failure is None:
            self._failure = self.server.failure
            self._end()
        for number, reply in replies:
            worker = self._starter.workers[number]
            worker.send(reply, self.server.descriptor_for(reply))
            if worker.request is None:
                self.roster.on(number, LifecycleEvent.GOES_ON)

    def _reap(self, worker: WorkerHandle, selector: BaseSelector) -> None:
        self._listen(worker, selector)  # its last messages
        worker.mark_ended()
        if self.roster.states[worker.number] in THERE:
            self._fail(worker, WorkerDied(worker.describe_exit(), worker.counts))
        self.roster.reaped(worker.number)
        if not worker.loss_known:
            self._on(Removed(worker.number))

    # ---- failures -------------------------------------------------------------------------------

    def _fail(self, worker: WorkerHandle, error: BaseException, waits: bool = False) -> None:
        """Execute the judge's decision; ``waits``: the worker waits for a ``SavePermission``."""
        now_s, number = time.monotonic(), worker.number
        match self.roster.failed(number, error, now_s, self.server.training, waits):
            case GoOn():
                to_stderr(f"{in_words(error)}; the others go on without it{worker.metrics_note()}")
                worker.mark_lost()
                self._on(Removed(number, announced=True))
            case Replace(delay_s, restart, anew):
                news = f"; restart {restart}, in {delay_s:g} s" + _ANEW * anew
                to_stderr(f"{in_words(error)}{news}{worker.metrics_note()}")
                if anew:
                    self._failure = BeginAnew(delay_s)
                    self._end()
                else:
                    worker.mark_lost()
                    self._on(Removed(number, announced=True, returns=True))
            case End(reason):
                if reason:
                    error.add_note(f"The run ends, because {reason}.")
                self._give_up(number, error)
        if waits and self.roster.states[number] is not WorkerState.STOPPED:
            worker.send(SavePermission(False))

    def _give_up(self, number: int, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            if isinstance(error, KeyboardInterrupt):  # Lightning handles it as Ctrl-C
                to_stderr(in_words(error))
        self._end()
        self._on(Received(number, Stopped(broke=True)))

    # ---- actions of the roster ------------------------------------------------------------------

    def _do(self, acts: Sequence[Act], selector: BaseSelector) -> None:
        for act in acts:
            match act:
                case Ask(teller, whom, question):
                    self._starter.workers[teller].send(RequestProgress(whom, question))
                case Start(number, progress):
                    self._restart(number, progress, selector)
                case PermitSave(number, saves):
                    left = self._left if saves else {}
                    self._starter.workers[number].send(SavePermission(saves, left))
                case GiveUp(number, reason):
                    self._give_up(number, WorkerError(f"worker {number} is lost: {reason}"))
                case Say(text):
                    to_stderr(text)
                case BreakOff():
                    self._on(BrokenOff())
                case Kill(number):
                    self._starter.workers[number].kill()
                case KillAll():
                    self._starter.kill()

    def _restart(self, number: int, progress: bytes, selector: BaseSelector) -> None:
        """Start the worker again; meetings wait for it from now on."""
        version = self.server.membership.rounds.version
        try:
            self._starter.start([number], selector, RestartPoint(progress, version))
        except OSError as error:  # too many processes, too little memory, no descriptor left
            self._do(self.roster.refused(number, error, time.monotonic()), selector)
            return
        self.roster.started(number)
        self._on(Restarted(number))
        if self.roster.ending:
            self._starter.workers[number].send(Stop())

    def _end(self) -> None:
        """Ask all workers to stop, once."""
        if self.roster.ending:
            return
        asked = self.roster.those(*THERE)
        lost = self.roster.stop(time.monotonic())
        self._send([(number, Stop()) for number in asked])
        for number in lost:
            self._on(Received(number, Stopped(broke=True)))

    def _react_to_signals(self) -> None:
        while self._signals:
            signum = self._signals.pop(0)
            if not self.roster.ending or isinstance(self._failure, BeginAnew):
                self._failure = Interrupted(signum)
                self._end()
            elif time.monotonic() > self.roster.began_s + _SAME_SIGNAL_S:
                self.roster.insist()


def running(workers: Sequence[WorkerHandle]) -> list[WorkerProcess]:
    """The processes of this host that have not ended."""
    return [each for each in workers if isinstance(each, WorkerProcess) and not each.gone]
