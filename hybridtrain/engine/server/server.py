"""The server: takes events, returns replies, owns the master parameters.

Theory of operation. The server is an actor: ``on(event)`` takes one event, such as a worker's
request, and returns the replies to this and other workers. Nothing else changes its state once
training has begun, so recorder, profiler and replay wrap this one method. The server owns the
master parameters, the updates (the user's optimizers) and the version counter; its policy decides
when a contribution counts and which workers are released. It neither sends nor receives: a *world*
carries the messages between processes, or through virtual time. Nothing here blocks, so a lost
worker cannot stop the server; the world reports it (``Removed``).

A worker that waits in a meeting (a barrier, a metric, the end of an epoch) is *parked*: rounds are
completed without it. If all workers take the same steps this has no effect, because a meeting ends
before any worker can be a step ahead; if a worker runs out of data early, the others continue.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import product

import torch

from hybridtrain.engine.exchanges import Exchange, Inside, begin_policy, exchange_of
from hybridtrain.engine.exchanges.compression import codec_of
from hybridtrain.engine.exchanges.exchange import MergeRule, check_rule
from hybridtrain.engine.memory import Store
from hybridtrain.engine.policies import Policy
from hybridtrain.engine.protocol.events import (
    Admitted,
    Announced,
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
    Answer,
    Average,
    Begin,
    Called,
    Changed,
    Claim,
    Claimed,
    Done,
    Draw,
    Gather,
    Gathered,
    GetState,
    Install,
    Lent,
    Note,
    OptimizerState,
    Overtaken,
    Paused,
    Pull,
    Push,
    ReadStats,
    Refused,
    Released,
    Reply,
    Request,
    Resumed,
    ScheduleCall,
    Share,
    Shared,
    Snapshot,
    Stats,
    Stop,
    Stopped,
)
from hybridtrain.engine.server.barrier import Barrier, BarrierMismatch
from hybridtrain.engine.server.batch_queue import BatchQueue
from hybridtrain.engine.server.handed_over import HandedOver
from hybridtrain.engine.server.membership import Membership
from hybridtrain.engine.server.refusals import missed, stuck
from hybridtrain.engine.server.rounds import Replies, Rounds
from hybridtrain.engine.server.run_statistics import RunStatistics, Traffic
from hybridtrain.engine.server.shared_parameters import shared_store
from hybridtrain.engine.server.stop_requests import StopRequests
from hybridtrain.engine.server.timeline import Timeline
from hybridtrain.engine.server.workers_updates import WorkersUpdates
from hybridtrain.engine.updates import OptimizerFailed, Optimizers, load_updates
from hybridtrain.engine.updates.staleness import Correction
from hybridtrain.engine.updates.staleness.correction import LateGradients
from hybridtrain.engine.updates.thread_pool import Pool
from hybridtrain.errors import UserError

_CALLS = 1024  # updates of a schedule's calls that are remembered

_PATH = "all workers must take the same path here"


class ParameterServer:
    """The server of ``n_workers`` workers.

    Args:
        policy: decides when a contribution counts, and which workers are released.
        n_workers: W, all expected from the start.
        threads: how many threads an update may use.
        clock: seconds; virtual time has its own.
        correction: of late gradients, if any.
        exchange: what workers push; by default that of the policy.
        merge: the user's rule in place of the mean of gradients.
        timeline: to be filled.
        inside: what the workers of one host do together.
        traffic: of several hosts, for the statistics.
        state_dtype: of the optimizers' state tensors, between updates.

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
        merge: MergeRule | None = None,
        timeline: Timeline | None = None,
        inside: Inside | None = None,
        traffic: Traffic | None = None,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.policy, self._merge, self._state_dtype = policy, merge, state_dtype
        exchange = exchange or exchange_of(policy)
        self.requirements = wants = begin_policy(policy, exchange, n_workers, inside)
        if merge is not None:
            check_rule(merge, policy, wants.gathers, wants.holds)
        self.statistics = RunStatistics(n_workers, clock, timeline, traffic)
        self.failure: BaseException | None = None  # raised by an optimizer
        members = self._members = set(range(n_workers))
        self._meeting: Barrier[Request] = Barrier(set(members))
        self._pool, self._late = Pool(threads), LateGradients(correction, self.statistics.age)
        self._queue = BatchQueue(members, backs_up=wants.backs_up)
        handed_over = HandedOver(codec_of(exchange), self.statistics)
        self._rounds = Rounds(
            policy, wants, self.statistics, self._queue, members, self._pool, handed_over, merge
        )
        self.workers_updates = WorkersUpdates(self.statistics, handed_over)
        self.membership = Membership(
            members, self._meeting, self._queue, self._rounds, self.statistics
        )
        self._wishes = StopRequests(members, self.statistics, wants.whole_rounds)
        # By worker: schedule calls of others, to be repeated; by schedule: updates that have one.
        self._schedule_calls: dict[int, list[ScheduleCall]] = {}
        self._updates_called_for: dict[int, deque[int]] = {}
        self._stopped: set[int] = set()
        self._finished: set[int] = set()

    @property
    def store(self) -> Store | None:
        """Masters and rows, once parameters have been shared."""
        return self._rounds.store

    def descriptor_for(self, reply: Reply) -> int | None:
        """The descriptor of the memory that the reply tells of, to be sent with it."""
        if not isinstance(reply, Shared) or self.store is None:
            return None
        return self.store.descriptor(reply.lent)

    @property
    def version(self) -> int:
        """The number of updates, including unreported ones of workers."""
        return self._rounds.version

    @property
    def optimizers(self) -> Optimizers:
        """The optimizers over the masters."""
        return self._rounds.optimizers

    # ---- events ---------------------------------------------------------------------------------

    def on(self, event: Event) -> Replies:
        """Take an event; returns the replies that follow, each with its worker."""
        workers = self.workers_updates
        assert not self.update_is_due or isinstance(event, UpdateDue), "an update is due first"
        if isinstance(event, Announced):
            if not (self._stopped or self.membership.joining or self.membership.missing):
                self._rounds.foresee(event, self._members)
            return []
        self._rounds.expect(event)
        if isinstance(event, (Removed, BrokenOff)):
            workers.take_over()
        elif isinstance(event, Looked):
            workers.free()
        workers.look()
        if not workers.one_by_one:
            replies = self._with_schedule_calls(self._on(event))
            self._rounds.conclude()
            return replies
        with workers.stopped(self.optimizers):
            return self._with_schedule_calls(self._on(event))

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
            case UpdateDue():
                return self._guarded([], self._rounds.make_due_update)
            case BrokenOff():
                self._rounds.breaks()
                return self._wishes.answer() + self._dismiss(waits=True)
        return []

    def _received(self, worker: int, message: Request | Note) -> Replies:
        if isinstance(message, Gather) and message.wish:
            others_wait = bool(self._rounds.waiting or self._meeting.waiting or self._stopped)
            return self._wishes.take(worker, message, others_wait)
        denied = self._wishes.observe(message) + self._invite(message)
        return denied + (self._answer(worker, message) or self._free_the_stuck())

    def _invite(self, message: Request | Note) -> Replies:
        """Invite patient workers to a round, or a meeting, that needs all workers."""
        invited = self._meeting.invite() if getattr(message, "invites", False) else []
        freed = [each for worker in invited for each in self._rounds.join(worker)]
        return freed + [(worker, _invitation_to(message)) for worker in invited]

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
            case Claim(batch):
                counts, others = self._queue.claim(worker, batch)
                return [(worker, Claimed(counts)), *((each, Overtaken(batch)) for each in others)]
            case Pull():
                return self._pull(worker, message)
            case Snapshot():
                return self._snapshot(worker, message)
            case GetState(number, flat=True):
                state = self.workers_updates.lend(self.store, self.optimizers, number)
                return [(worker, Lent(state))]
            case GetState(number, arena):
                assert self.store is not None, "parameters are shared before anything is lent"
                if arena is None:
                    return [(worker, self.optimizers.lent(number))]
                return [(worker, Shared(self.store.lending.arenas[arena].n_bytes, arena))]
            case ReadStats():
                return [(worker, Stats(self.statistics.stats()))]
            case Paused():
                self.statistics.pause()
            case Resumed():
                self.statistics.resume()
            case Called(calls):
                for call in calls:
                    self._forward(worker, call)
            case Changed(number, changes):
                self.optimizers.apply_changes(worker, number, changes)
            case Stopped():
                return self._wishes.answer() + self._stop_waiting_for(worker)
        return []

    def _pull(self, worker: int, request: Pull) -> Replies:
        if request.looks:
            self.optimizers.settle()
            return [(worker, Done())]
        several = request.alike and len(self._members) > 1  # one alone does not meet
        self._rounds.take(worker, request.writes, self._meeting.n_held if several else None)
        self.optimizers.settle()
        freed = self._rounds.refresh(worker)
        return [*freed, (worker, Released(self._rounds.version))]

    def _forward(self, worker: int, call: ScheduleCall) -> None:
        """Keep the call for other workers, or for all if it is the first of an update."""
        number, _, _, updates = call
        workers = self._members - {worker}
        if updates:
            made = self._updates_called_for.setdefault(number, deque(maxlen=_CALLS))
            oldest = min(made) if len(made) == _CALLS else -1
            remaining = [u for u in (updates[-1], *updates) if u > oldest and u not in made]
            if not remaining:
                return
            made.append(remaining[0])
            workers = self._members
        for each in workers:
            self._schedule_calls.setdefault(each, []).append(call)

    def _with_schedule_calls(self, replies: Replies) -> Replies:
        """Before its next answer a worker receives the schedule calls of the others.

        Each worker steps schedules of its own, and repeats the calls that the others make by hand,
        so that a schedule counts all calls, as on one device. A replay repeats their order.
        """
        if not self._schedule_calls:
            return replies
        told: Replies = []
        for worker, reply in replies:
            if isinstance(reply, Answer) and (calls := self._schedule_calls.pop(worker, None)):
                told.append((worker, Called(tuple(calls))))
            told.append((worker, reply))
        return told

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
        """The time of the next ``TimerExpired``, if any."""
        return self._rounds.wake_at_s

    @property
    def update_is_due(self) -> bool:
        """Whether the world is to send the replies, and then an ``UpdateDue``, before all else."""
        return self._rounds.update_is_due

    @property
    def training(self) -> bool:
        """Whether training has begun, so that remaining workers could continue."""
        return bool(self.optimizers.updates)

    def _free_the_stuck(self) -> Replies:
        """Refuse all workers if they all wait, and no timer is set: a deadlock."""
        n_waiting = len(self._rounds.waiting) + len(self._meeting.waiting)
        goes_on = n_waiting < len(self._members) or self.wake_at_s is not None
        if goes_on or self._stopped or not self._members or self.membership.missing:
            return []
        meeting = " in ".join(["all", *{repr(each): 0 for each in self._meeting.places.values()}])
        reason = stuck(self.policy, [*self._rounds.who_waits(), (meeting, self._meeting.waiting)])
        return self._refuse([], reason)

    # ---- rounds ---------------------------------------------------------------------------------

    def _round(self, worker: int, request: Push | Average | Begin) -> Replies:
        if self._rounds.broken or worker in self._stopped:
            return [(worker, Stop(now=True))]
        try:
            self._apart([worker], self._meeting.items)
        except UserError as error:
            return self._refuse([worker], str(error))
        match request:
            case Average():
                return self._rounds.average(worker, request, worker in self.membership.joining)
            case Begin(writes):
                return self._guarded([worker], lambda: self._rounds.ready(worker, writes))
            case Push():
                self.membership.joining.discard(worker)
                return self._guarded([worker], lambda: self._rounds.push(worker, request))

    def _apart(self, steps: Iterable[int], waiting: Iterable[int]) -> None:
        """See that no worker makes a step while another waits for it in the step before.

        Raises:
            UserError: if one does, in lock-step.
        """
        if not self.requirements.whole_rounds or self.membership.missing | self.membership.joining:
            return
        for worker, other in product(steps, waiting):
            request = self._meeting.items.get(other)
            if worker != other and isinstance(request, Gather) and request.in_step:
                place = self._meeting.places[other]
                raise UserError(
                    f"worker {worker} makes a step while worker {other} waits in '{place}'; {_PATH}"
                )

    def _guarded(self, workers: Iterable[int], action: Callable[[], Replies]) -> Replies:
        """Refuse all waiting workers if the action fails."""
        try:
            return action()
        except OptimizerFailed as error:
            self.failure = self.failure or error.__cause__
            return self._refuse(workers, str(error))
        except UserError as error:
            return self._refuse(workers, str(error))

    def _snapshot(self, worker: int, request: Snapshot) -> Replies:
        optimizers = self._rounds.optimizers
        if self.failure is not None:
            text = f"an optimizer failed half-way through its step: {self.failure}"
            return [(worker, Refused(text))]
        if optimizers.under_way is not None:
            return [(worker, Refused("an optimizer is in the middle of its step"))]
        optimizers.settle()
        freed = self._rounds.refresh(worker) if request.refresh else []
        state, steps = optimizers.dump(request.place), self._rounds.step_counts
        ahead = 0 if steps is None else steps.ahead
        version = self.statistics.version + ahead  # the version of the optimizers' state
        samples = self.statistics.samples + (self._rounds.untold_samples() if ahead else 0.0)
        counted = version - self.statistics.first_version, int(samples)
        return [*freed, (worker, OptimizerState(state, version, self._queue.unseen(), *counted))]

    def _refuse(self, workers: Iterable[int], reason: str) -> Replies:
        """Refuse these and all waiting workers, for this reason."""
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
            known: list[Request] = [*self._rounds.pushed.values(), *self._meeting.items.values()]
            inviting = [each for each in known if getattr(each, "invites", False)]
            if patient and inviting:
                return [(worker, _invitation_to(inviting[0]))]
            self._meeting.bring(worker, tag, request, patient, getattr(request, "names", ""))
            self._apart(self._rounds.waiting, [worker])
        except BarrierMismatch as error:
            return self._refuse([worker], f"{error}; {_PATH}")
        except UserError as error:
            return self._refuse([worker], str(error))
        return self._guarded([worker], lambda: self._rounds.park(worker)) + self._close_meeting()

    def _close_meeting(self) -> Replies:
        items = self._meeting.close()
        if items is None:
            return []
        workers = list(items)
        try:
            reply = self._conclude(workers, list(items.values()))
        except UserError as error:
            return self._refuse(workers, str(error))
        answers: Replies = [(worker, reply) for worker in workers]
        behind = self.statistics.age
        if any(isinstance(each, Gather) and each.admits for each in items.values()):
            answers = self.membership.take_in() + answers
        return answers + [
            each for worker in workers for each in self._rounds.join(worker, behind(worker))
        ]

    def _conclude(self, workers: list[int], requests: Sequence[Request]) -> Answer:
        """The answer to all ``workers``, whose ``requests`` are of one kind.

        Raises:
            UserError: if the requests contradict each other.
        """
        match requests[0]:
            case Gather():
                payloads = tuple(r.payload for r in requests if isinstance(r, Gather))
                return Gathered(payloads, tuple(workers), self.membership.remaining)
            case Share():
                shares = [r for r in requests if isinstance(r, Share)]
                by_worker = dict(zip(workers, shares, strict=True))
                n_workers = self.statistics.n_workers
                store = shared_store(by_worker, n_workers, self.requirements)
                self._rounds.share(store)
                return Shared(store.arena.n_bytes)
            case Install():
                return self._install(workers, requests[0])
        raise AssertionError(requests[0])

    def _install(self, workers: list[int], install: Install) -> Done:
        store, known = self.store, self.optimizers.updates
        assert store is not None, "parameters are shared before optimizers are installed"
        if not known and store.step_counts is not None:
            store.step_counts.begin(install.version)
        rules = self._merge, self._state_dtype
        updates = load_updates(install.optimizers, store, self._pool, known, *rules)
        if not known:
            self.statistics.start(install.version)
            self._rounds.begin(install.version, install.last)
        self.adopt(store, Optimizers(updates, store, self._pool))
        store.moves.all_of(range(len(store.layout.slots)))  # the leader has written the masters
        for worker in workers:
            self._rounds.refresh(worker)
        return Done()

    def adopt(self, store: Store | None, optimizers: Optimizers) -> None:
        """Step these from now on. Without a store there are no parameters, only time passes."""
        self._rounds.share(store)
        self._rounds.step_with(optimizers)
        optimizers.correct_by(self._late.begun(store))

    # ---- stopping -------------------------------------------------------------------------------

    def _stop_waiting_for(self, worker: int) -> Replies:
        """The worker has stopped: dismiss the workers that wait together with it."""
        self._note_stopped({worker})
        freed: Replies = []
        if not self.requirements.whole_rounds:  # others wait for its next step, or its turn
            freed = self._guarded([], lambda: self._rounds.lost(worker))
        return freed + self._dismiss(waits=self.requirements.whole_rounds, but=worker)

    def _dismiss(self, waits: bool, but: int | None = None) -> Replies:
        """Stop all workers in a meeting and, with ``waits``, in a round."""
        waiting = set(self._meeting.waiting)
        self._meeting.dissolve()
        if waits:
            waiting |= self._rounds.waiting
            self._rounds.dissolve()
        return [(each, Stop(now=True)) for each in sorted(waiting - {but})]

    def _note_stopped(self, workers: set[int]) -> None:
        """In lock-step no round can be complete any more."""
        self._stopped |= workers
        if self.requirements.whole_rounds and self._stopped:
            self._rounds.breaks()

    def close(self) -> None:
        """End the threads of the update."""
        self._rounds.drop_early()
        self._rounds.optimizers.close()
        self._pool.close()


def _invitation_to(message: Request | Note) -> Gathered:
    return Gathered((), (), join="round" if isinstance(message, Push) else "meeting")
