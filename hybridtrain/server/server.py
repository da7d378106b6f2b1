"""The server: takes events, returns replies, owns the master parameters.

Theory of operation. The server is an actor: ``on(event)`` takes one event (a request of a worker,
say) and returns the replies that follow from it, to this worker and to others. Nothing else changes
its state once training has begun, so whoever records, measures or replays wraps this one method. It
owns the master parameters, the updates (the user's optimizers) and the version counter, and asks
its policy when a contribution counts and who may go on. It neither sends nor receives: a *world*
carries the messages between processes, or through virtual time. Nothing here blocks, so a worker
that never comes back cannot stop the server; the world tells it so (``Removed``).

A worker that waits in a meeting (a barrier, a metric, the end of an epoch) is *parked*: rounds are
completed without it. Where all workers take the same steps this never shows, because a meeting ends
before anyone can be a step ahead; where a worker runs out of data early, the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from hybridtrain.errors import UserError
from hybridtrain.exchanges import Exchange, combine, exchange_of
from hybridtrain.exchanges.compression import codec_of
from hybridtrain.memory import Store
from hybridtrain.policies import Policy
from hybridtrain.protocol.messages import (
    Average,
    Begin,
    Called,
    Changed,
    Draw,
    Gather,
    Gathered,
    GetState,
    Install,
    Lent,
    Note,
    OptimizerState,
    Paused,
    Pull,
    Push,
    ReadStats,
    Refused,
    Released,
    Request,
    Resumed,
    Share,
    Snapshot,
    Stats,
    Stop,
    Stopped,
)
from hybridtrain.protocol.server_events import (
    Admitted,
    BrokenOff,
    Completed,
    Event,
    Looked,
    Received,
    Removed,
    Restarted,
    TimerExpired,
    UpdateEnded,
)
from hybridtrain.server.barrier import Barrier, BarrierMismatch
from hybridtrain.server.batch_queue import BatchQueue
from hybridtrain.server.handed_over import HandedOver
from hybridtrain.server.membership import Membership
from hybridtrain.server.refusals import missed, stuck
from hybridtrain.server.rounds import Replies, Rounds
from hybridtrain.server.run_statistics import RunStatistics
from hybridtrain.server.schedule_calls import ScheduleCalls
from hybridtrain.server.setup import Setup
from hybridtrain.server.shared_parameters import lend, no_snapshot
from hybridtrain.server.stop_requests import StopRequests
from hybridtrain.server.workers_updates import WorkersUpdates
from hybridtrain.updates import OptimizerFailed, Optimizers
from hybridtrain.updates.staleness import Correction
from hybridtrain.updates.staleness.late_gradients import LateGradients
from hybridtrain.updates.thread_pool import Pool


class Server:
    """Decides for ``n_workers`` workers.

    Args:
        policy: when a contribution counts, and who may go on.
        n_workers: W, all expected from the start.
        threads: how many threads an update may use.
        clock: seconds; virtual time brings its own.
        correction: of late gradients, if any.
        exchange: what workers hand over; else what goes with the policy.

    Raises:
        UserError: if policy and exchange contradict each other.
    """

    def __init__(
        self,
        policy: Policy,
        n_workers: int,
        threads: int = 1,
        clock: Callable[[], float] = time.monotonic,
        correction: Correction | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        self.policy = policy
        exchange = exchange or exchange_of(policy)
        self.requirements = combine(policy, exchange, n_workers)
        self.statistics = RunStatistics(n_workers, clock)
        self.failure: BaseException | None = None  # what an optimizer has raised
        members = self._members = set(range(n_workers))
        self._meeting: Barrier[Request] = Barrier(set(self._members))
        self._pool, late = Pool(threads), LateGradients(correction, self.statistics.age)
        self._queue = BatchQueue(self._members)
        handed_over = HandedOver(codec_of(exchange), self.statistics)
        self._rounds = Rounds(
            policy,
            self.requirements,
            self.statistics,
            self._queue,
            members,
            self._pool,
            handed_over,
        )
        self.workers_updates = WorkersUpdates(self.statistics, handed_over)
        self.membership = Membership(
            members, self._meeting, self._queue, self._rounds, self.statistics
        )
        self.assembly = Setup(self._rounds, self.membership, self.statistics, self._pool, late)
        self._wishes = StopRequests(members, self.statistics, self.requirements.whole_rounds)
        self._calls = ScheduleCalls(members)
        self._stopped: set[int] = set()
        self._finished: set[int] = set()

    @property
    def store(self) -> Store | None:
        """Masters and rows, once parameters have been shared."""
        return self._rounds.store

    @property
    def optimizers(self) -> Optimizers:
        """What steps the masters."""
        return self._rounds.optimizers

    # ---- events ---------------------------------------------------------------------------------

    def on(self, event: Event) -> Replies:
        """It has happened; what follows for whom."""
        workers = self.workers_updates
        if isinstance(event, Removed | BrokenOff):
            workers.take_over()
        elif isinstance(event, Looked):
            workers.free()
        workers.look()
        if not workers.one_by_one:
            return self._calls.told_with(self._on(event))
        with workers.stopped(self.optimizers):
            return self._calls.told_with(self._on(event))

    def _on(self, event: Event) -> Replies:
        if isinstance(event, Received):
            return self._received(event.worker, event.message)
        match event:
            case Completed(worker):
                return self._completed(worker)
            case Removed():
                return self._removed(event)
            case Restarted(worker):
                self.membership.back(worker)
            case Admitted(worker):
                return self.membership.admit(worker)
            case TimerExpired():
                return self._guarded([], self._rounds.wake) or self._free_the_stuck()
            case UpdateEnded(ticket):
                replies = self._guarded([], lambda: self._rounds.complete(ticket))
                return replies or self._free_the_stuck()
            case BrokenOff():
                self._rounds.broken = True
                return self._wishes.answer() + self._dismiss(waits=True)
        return []

    def _received(self, worker: int, message: Request | Note) -> Replies:
        if isinstance(message, Gather) and message.wish:
            others_wait = bool(self._rounds.waiting or self._meeting.n_waiting or self._stopped)
            return self._wishes.take(worker, message, others_wait)
        denied = self._wishes.hears(message) + self._call(message)
        return denied + (self._answer(worker, message) or self._free_the_stuck())

    def _call(self, message: Request | Note) -> Replies:
        """Workers that wait patiently come to a round, or a meeting, that is to be one of all."""
        called = self._meeting.call() if getattr(message, "calls", False) else []
        freed = [each for worker in called for each in self._rounds.join(worker)]
        return freed + [(worker, _call_to(message)) for worker in called]

    def _answer(self, worker: int, message: Request | Note) -> Replies:
        match message:
            case Push() | Average() | Begin():
                return self._round(worker, message)
            case Share() | Install() if worker in self.membership.joining:
                return self.membership.let_in(worker, message)
            case Gather() | Share() | Install():
                return self._meet(worker, message)
            case Draw():
                return [(worker, self._queue.draw(worker, message))]
            case Pull(writes):
                self._rounds.take(worker, writes)
                self.optimizers.settle()
                self._rounds.refresh(worker)
                return [(worker, Released(self._rounds.version))]
            case Snapshot():
                return self._snapshot(worker, message)
            case GetState(number, flat=True):
                state = self.workers_updates.lend(self.store, self.optimizers, number)
                return [(worker, Lent(state))]
            case GetState():
                return [(worker, lend(self.store, self.optimizers, message))]
            case ReadStats():
                return [(worker, Stats(self.statistics.stats()))]
            case Paused():
                self.statistics.pause()
            case Resumed():
                self.statistics.resume()
            case Called():
                self._calls.take(worker, message)
            case Changed(number, groups):
                self.optimizers.hear(worker, Push(number, 0.0, groups=groups))
            case Stopped():
                return self._wishes.answer() + self._stop_waiting_for(worker)
        return []

    def _completed(self, worker: int) -> Replies:
        self._finished.add(worker)
        waiting = self._meeting.waiting
        return self._refuse(waiting, missed(worker, waiting)) if waiting else []

    def _removed(self, event: Removed) -> Replies:
        news = self.membership.news_of(event)
        freed = self._guarded([], lambda: self.membership.remove(event))
        freed += self._close_meeting() + self._wishes.answer()
        return news + (freed or self._free_the_stuck())

    @property
    def wake_at_s(self) -> float | None:
        """When a ``TimerExpired`` is wanted, if at all."""
        return self._rounds.wake_at_s

    @property
    def under_way(self) -> int | None:
        """The number of the update that goes on until an ``UpdateEnded``, if one does."""
        update = self._rounds.under_way
        return None if update is None else update.ticket

    @property
    def training(self) -> bool:
        """Whether it has begun, so that others could go on with it."""
        return bool(self.optimizers.updates)

    def _free_the_stuck(self) -> Replies:
        """If all who are left wait, and no timer or update runs, they would wait for ever."""
        if len(self._rounds.waiting) + self._meeting.n_waiting < len(self._members):
            return []
        if (
            self._stopped
            or not self._members
            or self.wake_at_s is not None
            or self.under_way is not None
            or self.membership.missing
        ):
            return []
        reason = stuck(self.policy, [*self._rounds.who_waits(), ("all", self._meeting.waiting)])
        return self._refuse([], reason)

    # ---- rounds ---------------------------------------------------------------------------------

    def _round(self, worker: int, request: Push | Average | Begin) -> Replies:
        if self._rounds.broken or worker in self._stopped:
            return [(worker, Stop(now=True))]
        match request:
            case Average():
                return self._rounds.average(worker, request, worker in self.membership.joining)
            case Begin(writes):
                return self._guarded([worker], lambda: self._rounds.ready(worker, writes))
            case Push():
                self.membership.joining.discard(worker)
                return self._guarded([worker], lambda: self._rounds.push(worker, request))

    def _guarded(self, workers: Iterable[int], action: Callable[[], Replies]) -> Replies:
        """What cannot be accepted, or fails, ends the run for all who wait."""
        try:
            return action()
        except OptimizerFailed as error:
            self.failure = self.failure or error.__cause__
            return self._refuse(workers, str(error))
        except UserError as error:
            return self._refuse(workers, str(error))

    def _snapshot(self, worker: int, request: Snapshot) -> Replies:
        optimizers = self._rounds.optimizers
        if (reason := no_snapshot(self.failure, optimizers)) is not None:
            return [(worker, Refused(reason))]
        optimizers.settle()
        if request.refresh:
            self._rounds.refresh(worker)
        state, store = optimizers.dump(request.place), self.store
        ahead = store.made.ahead if store is not None and store.made is not None else 0
        version = self.statistics.version + ahead  # which the state's steps agree with
        return [(worker, OptimizerState(state, version, self._queue.unseen()))]

    def _refuse(self, workers: Iterable[int], reason: str) -> Replies:
        """These workers and all who wait must end, with this reason."""
        waiting = {*workers, *self._meeting.waiting, *self._rounds.waiting}
        self._meeting.dissolve()
        self._rounds.dissolve()
        self._note_stopped(waiting)
        return [(each, Refused(reason)) for each in sorted(waiting)]

    # ---- meetings -------------------------------------------------------------------------------

    def _meet(self, worker: int, request: Gather | Share | Install) -> Replies:
        if self._stopped or self._rounds.broken:
            return [(worker, Stop(now=True))]
        if self._finished and worker not in self.membership.joining:
            return self._refuse([worker], missed(min(self._finished), [worker]))
        tag = request.tag if isinstance(request, Gather) else type(request).__name__
        try:
            patient = isinstance(request, Gather) and request.patient
            known: list[Request] = [*self._rounds.pushed.values(), *self._meeting.items]
            calling = [each for each in known if getattr(each, "calls", False)]
            if patient and calling:
                return [(worker, _call_to(calling[0]))]
            self._meeting.bring(worker, tag, request, patient)
        except BarrierMismatch as error:
            return self._refuse([worker], f"{error}; all workers must take the same path here")
        return self._guarded([worker], lambda: self._rounds.park(worker)) + self._close_meeting()

    def _close_meeting(self) -> Replies:
        items = self._meeting.close()
        if items is None:
            return []
        workers = list(items)
        try:
            reply = self.assembly.conclude(workers, list(items.values()))
        except UserError as error:
            return self._refuse(workers, str(error))
        answers: Replies = [(worker, reply) for worker in workers]
        return answers + [each for worker in workers for each in self._rounds.join(worker)]

    def adopt(self, store: Store | None, optimizers: Optimizers) -> None:
        """Step these from now on. Without a store there are no parameters, only time passes."""
        self.assembly.adopt(store, optimizers)

    # ---- stopping -------------------------------------------------------------------------------

    def _stop_waiting_for(self, worker: int) -> Replies:
        """The worker has stopped: what others wait for together with it will not happen."""
        self._note_stopped({worker})
        freed: Replies = []
        if not self.requirements.whole_rounds:  # others wait for its next step, or its turn
            freed = self._guarded([], lambda: self._rounds.lost(worker))
        return freed + self._dismiss(waits=self.requirements.whole_rounds, but=worker)

    def _dismiss(self, waits: bool, but: int | None = None) -> Replies:
        """Who is in a meeting will not be answered; nor who ``waits`` in a round."""
        waiting = set(self._meeting.waiting)
        self._meeting.dissolve()
        if waits:
            waiting |= self._rounds.waiting
            self._rounds.dissolve()
        return [(each, Stop(now=True)) for each in sorted(waiting - {but})]

    def _note_stopped(self, workers: set[int]) -> None:
        """In lock-step no round can be a whole one any more."""
        self._stopped |= workers
        self._rounds.broken |= self.requirements.whole_rounds and bool(self._stopped)

    def close(self) -> None:
        """End the threads of the update."""
        self._rounds.optimizers.close()
        self._pool.close()


def _call_to(message: Request | Note) -> Gathered:
    return Gathered((), (), call="round" if isinstance(message, Push) else "meeting")
