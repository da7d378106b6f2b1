"""Rounds: collect pushes, apply the policy's orders, release workers.

The part of the server between the policy, which decides, and the optimizers, which step. An invalid
push raises an error, and the server refuses the requests of all waiting workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from hybridtrain.engine.exchanges import Requirements
from hybridtrain.engine.exchanges.exchange import MergeRule
from hybridtrain.engine.memory import Store
from hybridtrain.engine.memory.counters import MadeSteps
from hybridtrain.engine.policies import Policy
from hybridtrain.engine.protocol.events import Announced, Event
from hybridtrain.engine.protocol.facts import (
    Accumulate,
    Apply,
    Began,
    Drop,
    Fact,
    Joined,
    Left,
    Order,
    Pushed,
    Ready,
    Release,
    ReleaseThenApply,
    SetTimer,
    TimerFired,
    Waiting,
)
from hybridtrain.engine.protocol.messages import (
    Average,
    DrawnBatch,
    ExchangePush,
    GradientPush,
    MadeStep,
    Push,
    Released,
    Reply,
    Writes,
)
from hybridtrain.engine.protocol.spans import total
from hybridtrain.engine.server.batch_queue import BatchQueue
from hybridtrain.engine.server.early_step import EarlyStep
from hybridtrain.engine.server.handed_over import HandedOver
from hybridtrain.engine.server.mean_round import Averaging
from hybridtrain.engine.server.promises import Promises
from hybridtrain.engine.server.refusals import misordered, objection
from hybridtrain.engine.server.run_statistics import RunStatistics
from hybridtrain.engine.updates import Optimizers, Stepped
from hybridtrain.engine.updates.thread_pool import Pool
from hybridtrain.errors import UserError

Replies = list[tuple[int, Reply]]
_NOTHING, _DROPPED = Stepped(()), Stepped(())


class _DueUpdate(NamedTuple):
    """An update of these ``pushes``, whose workers have been released.

    ``ages``: by worker, updates between its reading of the parameters and its release.
    """

    pushes: Mapping[int, Push]
    ages: Mapping[int, int]


class Rounds:
    """Collects pushes and carries out the policy's orders.

    Args:
        policy: decides when a contribution counts; it has begun.
        requirements: of policy and exchange.
        statistics: counts.
        queue: of mini-batches.
        workers: all workers at the start.
        pool: computes means.
        handed_over: counts and decodes contributions.
        merge: the user's rule in place of the mean of gradients.
    """

    def __init__(
        self,
        policy: Policy,
        requirements: Requirements,
        statistics: RunStatistics,
        queue: BatchQueue,
        workers: Iterable[int],
        pool: Pool,
        handed_over: HandedOver,
        merge: MergeRule | None = None,
    ) -> None:
        self.store: Store | None = None
        self.optimizers = Optimizers()
        self.broken = False  # a worker has stopped: no round can be complete any more
        self.wake_at_s: float | None = None  # the policy's timer
        self._policy, self.requirements = policy, requirements
        self._statistics, self._queue = statistics, queue
        self._averaging, self._handed_over = Averaging(workers, pool, merge), handed_over
        self.pushed: dict[int, Push] = {}  # by waiting worker
        self._ready: set[int] = set()  # workers that wait to begin
        self._held: list[tuple[int, int, tuple[DrawnBatch, ...]]] = []  # worker, age, mini-batches
        self._outcome: dict[int, Stepped] = {}  # of the pushes of waiting workers
        self._last: int | None = None  # the version after which no update is made
        self._early: EarlyStep | None = None
        self._due: _DueUpdate | None = None  # its workers have been released
        self._news: Stepped = _NOTHING  # of the last update that no worker has waited for
        self._promises = Promises(policy, requirements)
        self._final: set[int] = set()  # waiting workers whose contributions must not be dropped
        for worker in sorted(workers):
            self.join(worker)

    def share(self, store: Store | None) -> None:
        """Masters and rows lie here from now on."""
        self.store = store

    def step_with(self, optimizers: Optimizers) -> None:
        """Step these from now on."""
        self.optimizers = optimizers

    def begin(self, version: int, last: int | None) -> None:
        """Training begins at ``version``. ``last``: after this one no update is made."""
        self._obey(Began(version))
        self._last = last

    def breaks(self) -> None:
        """A worker has stopped: no round can be complete any more."""
        self.broken = True

    @property
    def _averages(self) -> bool:
        """Whether workers may request the mean of all gradients."""
        return self.store is not None and self.store.averaging

    @property
    def step_counts(self) -> MadeSteps | None:
        """The count of steps that workers make themselves, if they do."""
        return None if self.store is None else self.store.step_counts

    @property
    def version(self) -> int:
        """The number of updates, including unreported ones of workers."""
        return self._statistics.version if (made := self.step_counts) is None else made.total

    @property
    def waiting(self) -> frozenset[int]:
        """The workers that wait for a release or a mean."""
        return self._averaging.waiting | self.pushed.keys() | self._ready

    def who_waits(self) -> list[tuple[str, Iterable[int]]]:
        """Waiting workers, by the thing that they wait for."""
        averages = ("the mean of all gradients", self._averaging.waiting)
        return [("their release", self.pushed), ("their turn", self._ready), averages]

    @property
    def _over(self) -> bool:
        return self._last is not None and self._statistics.version >= self._last

    def ready(self, worker: int, writes: Writes) -> Replies:
        """The worker asks to begin a mini-batch, after these ``writes`` of user code."""
        self.take(worker, writes)
        self._ready.add(worker)
        self._statistics.waits(worker)
        return self._release_all() if self._over else self._obey(Ready(worker))

    def wake(self) -> Replies:
        """The policy's timer has expired."""
        at_s, self.wake_at_s = self.wake_at_s or 0.0, None
        return self._obey(TimerFired(max(self._statistics.clock(), at_s)))

    def push(self, worker: int, push: Push) -> Replies:
        """The worker's contribution lies in its row, or it has made its steps.

        Raises:
            UserError: if the push is invalid; ``OptimizerFailed`` if the step failed.
        """
        for former in push.former if isinstance(push, MadeStep) else ():  # one answer for all
            self._push(worker, former)
        return self._push(worker, push)

    def _push(self, worker: int, push: Push) -> Replies:
        others = self.pushed if self.requirements.whole_rounds else {}
        if (reason := objection(worker, push, others, self.optimizers)) is not None:
            raise UserError(reason)
        self._handed_over.take(worker, push, self.store, self.optimizers)
        self.pushed[worker] = push
        samples = self._samples(push)
        counts = self._contributes(push)
        self._statistics.pushed(worker, samples, push.fault, push.waits, push.waited_s, counts)
        self._averaging.forget(worker)
        freed: Replies = [*self._averaging.busy(worker, self.store)] if self._averages else []
        made = isinstance(push, MadeStep)  # it counts in any case
        if self._over or (not made and self._last is not None and self.version >= self._last):
            return freed + self._release_all()
        final = _follows(push) or self._queue.is_last_chance(push.covers)
        last = self.requirements.drops_late and final
        self._final.add(worker) if last else self._final.discard(worker)
        now_s, empty = self._statistics.clock(), push.weight <= 0
        freed += self._obey(Pushed(worker, now_s, push.loss, last, empty))
        if self.requirements.free and worker in self.pushed and not self.broken:
            raise UserError(self._promises.held_back(worker))
        return freed

    # ---- an update that workers do not wait for --------------------------------------------------

    @property
    def update_is_due(self) -> bool:
        """Whether workers have been released ahead of their update."""
        return self._due is not None

    def _release_ahead(self, workers: tuple[int, ...]) -> Replies:
        """Release these from the masters as they are; their update is due behind that."""
        pushes = {worker: self.pushed[worker] for worker in workers}
        ages = {worker: self._statistics.age(worker) for worker in workers}
        for worker, push in pushes.items():
            self.take(worker, push.writes)
        if self.store is not None and self.store.turns is not None:
            self.store.turns.begin()
        self._outcome.update(dict.fromkeys(workers, self._news))
        self._due = _DueUpdate(pushes, ages)
        return [self._release(worker, ahead=True) for worker in workers]

    def make_due_update(self) -> Replies:
        """Make the update that is due."""
        due, self._due = self._due, None
        assert due is not None, "an update is due"
        try:
            counted = self._step(due.pushes)
        finally:  # workers on devices wait for the end, also of an update that has failed
            if self.store is not None and self.store.turns is not None:
                self.store.turns.end()
        stepped = [self._outcome.pop(worker) for worker in due.pushes]
        self._news = Stepped((), news=stepped[0].news)
        self._count_update(due.pushes, counted, due.ages)
        return []

    # ---- an update that begins while rows arrive from other hosts -------------------------------

    def foresee(self, coming: Announced, members: set[int]) -> None:
        """Begin the next update if these pushes are all that it lacks."""
        pushes = dict(sorted({**self.pushed, **coming.pushes}.items()))
        fits = self.requirements.everyone and not (self.broken or self._over or self._averages)
        known = self._early is not None or pushes.keys() != members
        if fits and not known and self.optimizers.can_begin(list(pushes.values())):
            received = frozenset(self.pushed)
            version = self._statistics.version
            self._early = EarlyStep(self.optimizers, pushes, coming.arrivals, received, version)

    def expect(self, event: Event) -> None:
        """Before each event: undo what was begun early, unless this is a push of it."""
        if self._early is not None and not self._early.expects(event):
            self.drop_early()

    def conclude(self) -> None:
        """After each event: undo what was begun early if all its pushes are here, and unused."""
        if self._early is not None and self._early.is_due:
            self.drop_early()

    def drop_early(self) -> None:
        """Undo what was begun early."""
        early, self._early = self._early, None
        if early is not None:
            early.drop()

    def _take_early_step(self, pushes: Mapping[int, Push]) -> Stepped | None:
        early, self._early = self._early, None
        return None if early is None else early.take(pushes)

    def average(self, worker: int, request: Average, anew: bool = False) -> Replies:
        """Request the mean of all gradients; ``anew``: after a restart, perhaps again."""
        assert self.store is not None, "parameters are shared before gradients are averaged"
        self._handed_over.take_for_mean(worker, request.row, self.store)
        return [*self._averaging.ask(worker, request, self.store, anew)]

    def park(self, worker: int) -> Replies:
        """The worker waits for something else: do not wait for it in a round."""
        self._statistics.clocks.leave(worker)
        return [*self._averaging.busy(worker, self.store), *self._obey(Waiting(worker))]

    def join(self, worker: int, behind: int = 0) -> Replies:
        """The worker computes again; ``behind``: updates that it has not read."""
        self._statistics.clocks.join(worker)
        self._averaging.back(worker)
        return self._obey(Joined(worker, behind))

    def admit(self, worker: int) -> Replies:
        """The worker begins (anew) with the newest parameters."""
        return [*self.join(worker), self._release(worker)]

    def lost(self, worker: int) -> Replies:
        """The worker is gone, and its push, if no update has it."""
        counts = self._has_part(worker)
        self._lose_pushes([worker])
        self._ready.discard(worker)
        if (mean := self._averaging.forget(worker)) is not None and counts:
            self._statistics.pushed(worker, mean.weight)
        self._statistics.left(worker)
        return [*self._averaging.left(worker, self.store), *self._obey(Left(worker))]

    def untold_samples(self) -> float:
        """Samples of the steps that workers have made and not reported."""
        made = self.step_counts
        if made is None:
            return 0.0
        workers = range(self._statistics.n_workers)
        steps = (_unreported(made.untold(w), self._queue.untold(w)) for w in workers)
        return sum(push.samples or 0.0 for each in steps for push in each)

    def count_untold(self, worker: int) -> None:
        """The worker is gone: count its unreported steps, as if it had pushed each."""
        if (made := self.step_counts) is not None:
            for push in _unreported(made.untold(worker), self._queue.untold(worker)):
                self._push(worker, push)
            made.cover(worker, 0)

    def miss(self, worker: int) -> Replies:
        """The worker will be restarted, and repeat what it has not finished."""
        if not self.requirements.whole_rounds:
            return self.lost(worker)
        self._ready.discard(worker)
        self._statistics.idle(worker)
        if worker in self.pushed:  # its gradient lies in its row: the round needs nothing more
            return []
        self._averaging.miss(worker, keeps=self._has_part(worker))
        return self.join(worker)  # it may have been parked

    def last_part(self, worker: int) -> int:
        """The last update that the worker contributes to, perhaps by a mean not pushed yet."""
        return self.version + self._has_part(worker)

    def _has_part(self, worker: int) -> bool:
        """Whether its gradient is in a mean that other workers have got, too, and push."""
        given = self._averaging.given
        return worker in given and any(each != worker for each in (*given, *self.pushed))

    def settle_held(self, worker: int) -> None:
        """Settle the worker's mini-batches in held contributions."""
        for other, _, covers in self._held:
            if other == worker:
                self._queue.settle(worker, covers)

    def refresh(self, worker: int) -> Replies:
        """Update the worker's parameters; a policy that drops late gradients is told."""
        if self.store is not None:
            self.store.refresh(worker)
        self.optimizers.read(worker)
        behind = self._statistics.age(worker)
        self._statistics.read(worker)
        tells = behind and self.requirements.drops_late
        return self._obey(Joined(worker)) if tells else []

    def take(self, worker: int, writes: Writes, meeting: int | None = None) -> None:
        """Apply the writes of the worker's user code; all make them behind a ``meeting``."""
        if writes:
            assert self.store is not None, "parameters are shared before they are written to"
            self.store.take(worker, writes, meeting)

    def dissolve(self) -> None:
        """Drop all pushes and requests."""
        self._lose_pushes(list(self.pushed))
        self._ready.clear()
        self._averaging.dissolve()

    def _lose_pushes(self, workers: Iterable[int]) -> None:
        """Drop these workers' pushes; those held still count."""
        for worker in workers:
            push, outcome = self.pushed.pop(worker, None), self._outcome.pop(worker, None)
            if push is not None and outcome is None:
                self._statistics.dropped(worker, self._samples(push), self._contributes(push))

    # ---- orders ---------------------------------------------------------------------------------

    def _obey(self, fact: Fact) -> Replies:
        if self.broken:
            return []
        self._promises.hear(fact)
        orders = self._policy.on(fact)
        return self._do(orders if isinstance(orders, (tuple, list)) else (orders,))

    def _do(self, orders: Sequence[Order]) -> Replies:
        """Carry out the orders one after the other.

        Raises:
            UserError: if one is impossible.
        """
        replies: Replies = []
        for order in orders if not self._over else ():
            self._check(order)
            match order:
                case Apply() if self._over:  # an earlier order made the last update
                    break
                case Apply(workers) if self._lacks_portions(workers):
                    for worker in workers:
                        self._hold(worker)
                case Apply(workers):
                    self._apply(workers)
                case Release(workers):
                    replies += [self._release(worker) for worker in workers]
                case ReleaseThenApply(workers):
                    replies += self._release_ahead(workers)
                case Accumulate(workers):
                    for worker in workers:
                        self._hold(worker)
                case Drop(workers):
                    for worker in workers:
                        self._drop(worker)
                case SetTimer(at_s):
                    self.wake_at_s = at_s
        return replies + self._release_all() if self._over else replies

    def _check(self, order: Order) -> None:
        reason = misordered(self._policy, order, self.pushed, self._outcome, self._ready)
        reason = reason or self._promises.broken(order, self._final, self._ready)
        if reason is not None:
            raise UserError(reason)

    def _lacks_portions(self, workers: Iterable[int]) -> bool:
        """Whether others will still process a part of the pass that this update evaluates."""
        if not self.requirements.evaluates:
            return False
        pushed = [cover for worker in workers for cover in self.pushed[worker].covers]
        held = [cover for _, _, covers in self._held for cover in covers]
        return not self._queue.is_whole([*pushed, *held])

    def _contributes(self, push: Push) -> bool:
        """True for a contribution, false for a push with which a worker only fetches parameters."""
        return push.weight > 0 or self.requirements.whole_rounds or push.fault != ""

    def _release_all(self) -> Replies:
        """Update limit reached: drop pending pushes and release all workers."""
        for worker, push in self.pushed.items():
            if worker not in self._outcome:
                self._statistics.dropped(worker, self._samples(push), self._contributes(push))
                self._outcome[worker] = _dropped(push)
        return [self._release(worker) for worker in sorted(self.pushed.keys() | self._ready)]

    def _apply(self, workers: tuple[int, ...]) -> None:
        """Make one update of these workers' pushes and all held ones."""
        pushes = {worker: self.pushed[worker] for worker in workers}
        for worker, push in pushes.items():
            self.take(worker, push.writes)
        self._count_update(pushes, self._step(pushes))

    def _count_update(
        self,
        pushes: Mapping[int, Push],
        counted: Sequence[int],
        at_release: Mapping[int, int] | None = None,
    ) -> None:
        """Count the update, unless the optimizer needs another evaluation.

        ``at_release``: the ages of contributions whose workers have been released since.
        """
        again = any(worker in self._outcome and self._outcome[worker].again for worker in pushes)
        if not again and (counted or self._held or self.requirements.whole_rounds):
            seen = self._statistics.age if at_release is None else at_release.__getitem__
            own = {w: push.age for w, push in pushes.items() if isinstance(push, MadeStep)}
            ages = [own[w] if w in own else seen(w) for w in counted]
            self._statistics.updated([*ages, *[age for _, age, _ in self._held]])
            if (made := self.step_counts) is not None:
                made.count(tuple(own))
        for worker, _, covers in self._held:
            self._queue.settle(worker, covers)
        self._held.clear()
        for worker, push in pushes.items():
            if push.covers:
                self._queue.done(worker, push, self._samples(push))

    def _step(self, pushes: Mapping[int, Push]) -> Sequence[int]:
        """Step each optimizer with its pushes; returns the workers whose contributions count."""
        counted: list[int] = []
        for number, own in _by_optimizer(pushes, self.optimizers.holding).items():
            lead = min(own) if own and self.requirements.whole_rounds else None
            stepped = self._take_early_step(own) or self.optimizers.step(
                own, number, lead=lead, version=self._statistics.version
            )
            self._outcome.update(dict.fromkeys(own, stepped))
            counted += stepped.workers
        return counted

    def _hold(self, worker: int) -> None:
        """Hold the contribution for the next update."""
        push = self.pushed[worker]
        self.take(worker, push.writes)
        if self.optimizers.hold(worker, push):
            evaluates = self.requirements.evaluates
            holder = self._queue.keep(worker, push.covers) if evaluates else worker
            self._held.append((holder, self._statistics.age(worker), push.covers))
        else:
            self._queue.settle(worker, push.covers)
        self._outcome[worker] = _NOTHING

    def _drop(self, worker: int) -> None:
        """Drop a late contribution, and return its mini-batch to the queue."""
        push = self.pushed[worker]
        self._queue.give_back(worker, push.covers)
        self.take(worker, push.writes)
        self.optimizers.apply_changes(worker, push.optimizer, push.changes)
        self._statistics.dropped(worker, self._samples(push), self._contributes(push))
        self._outcome[worker] = _dropped(push)

    def _samples(self, push: Push) -> float:
        """The samples that the push counts for; of several evaluations only the first counts."""
        return 0.0 if self.optimizers.under_way is not None else samples_of(push)

    def _release(self, worker: int, ahead: bool = False) -> tuple[int, Reply]:
        """``ahead``: of an update that is due behind this release."""
        self._ready.discard(worker)
        push = self.pushed.pop(worker, None)
        fetches = not isinstance(push, ExchangePush) or push.fetch
        if self._averages:
            self._averaging.back(worker)
        if self.store is not None and fetches and not isinstance(push, MadeStep):
            if not ahead:
                self.store.refresh(worker)
            self.optimizers.read(worker)
            self.optimizers.show_trial(worker)
        self._statistics.released(worker, fetches)
        stepped = self._outcome.pop(worker, _NOTHING)
        tickets = tuple(self._queue.draw(worker, each) for each in (push.draws if push else ()))
        again, counted = stepped.again, stepped is not _DROPPED
        cleared, news = again is not None and again.cleared, stepped.news
        return worker, Released(
            self.version + ahead,
            again is not None,
            cleared,
            news,
            stepped.step_number,
            counted,
            tickets,
        )


def _by_optimizer(
    pushes: Mapping[int, Push], holding: Iterable[int]
) -> dict[int, Mapping[int, Push]]:
    """The pushes of each optimizer, also of those with held contributions only."""
    numbers = {*holding, *(push.optimizer for push in pushes.values())}
    return {
        number: {w: push for w, push in pushes.items() if push.optimizer == number}
        for number in sorted(numbers)
    }


def _dropped(push: Push) -> Stepped:
    """The outcome of a dropped push: its mini-batch, too, unless an earlier push has counted it."""
    return _NOTHING if _follows(push) else _DROPPED


def _follows(push: Push) -> bool:
    return isinstance(push, GradientPush) and push.follows


def samples_of(push: Push) -> float:
    """The samples that a push counts for."""
    return push.weight if push.samples is None else push.samples


def _unreported(n: int, covers: Sequence[DrawnBatch]) -> Iterator[MadeStep]:
    """The pushes of ``n`` unreported steps that have covered these mini-batches."""
    for step in range(n):
        own = tuple(covers[step * len(covers) // n : (step + 1) * len(covers) // n])
        samples = float(sum(total(cover.spans) for cover in own))
        yield MadeStep(0, 1.0, samples=samples, covers=own)
