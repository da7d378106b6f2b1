"""The one who decides.

Theory of operation. The server is an actor: ``handle(worker, request)`` takes one request and
returns the replies that follow from it, to this worker and to others. It owns the master
parameters, the updates (the user's optimizers) and the version counter, and asks its policy when a
contribution counts and who may go on. It neither sends nor receives: a *world* carries the messages
between processes, or through virtual time. Nothing here blocks, so a worker that never comes back
cannot stop the server; the world tells it with ``lost(worker)``.

A worker that waits in a meeting (a barrier, a metric, the end of an epoch) is *parked*: rounds are
completed without it. Where all workers take the same steps this never shows, because a meeting ends
before anyone can be a step ahead; where a worker runs out of data early, the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from hybridtrain.averaging import Averaging
from hybridtrain.batch_queue import BatchQueue
from hybridtrain.errors import UserError
from hybridtrain.events import Apply, Fact, Joined, Left, Parked, Pushed, Release
from hybridtrain.ledger import Ledger
from hybridtrain.meeting import Meeting, MeetingMismatch
from hybridtrain.memory import Store
from hybridtrain.messages import (
    Average,
    Done,
    Draw,
    Gather,
    Gathered,
    Install,
    Note,
    Paused,
    Pull,
    Push,
    ReadStats,
    Refused,
    Released,
    Reply,
    Request,
    Resumed,
    Share,
    Shared,
    Snapshot,
    State,
    Stats,
    Stop,
    Stopped,
)
from hybridtrain.policies import Policy
from hybridtrain.update import Optimizers, load_updates
from hybridtrain.update.pool import Pool

Replies = list[tuple[int, Reply]]


class Server:
    """Decides for ``n_workers`` workers.

    Args:
        policy: when a contribution counts, and who may go on.
        n_workers: W, all expected from the start.
        threads: how many threads an update may use.
        clock: seconds; virtual time brings its own.
    """

    def __init__(
        self,
        policy: Policy,
        n_workers: int,
        threads: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy = policy
        self.ledger = Ledger(n_workers, clock)
        self.store: Store | None = None
        self._members = set(range(n_workers))
        self._meeting: Meeting[Request] = Meeting(set(self._members))
        self._pool = Pool(threads)
        self._optimizers = Optimizers()
        self._pushes: dict[int, Push] = {}
        self._averaging = Averaging(self._members)
        self._queue = BatchQueue(self._members)
        self._stopped: set[int] = set()
        self._finished: set[int] = set()
        for worker in range(n_workers):
            self.policy.on(Joined(worker))

    # ---- requests -------------------------------------------------------------------------------

    def handle(self, worker: int, request: Request) -> Replies:
        """One request in, replies out."""
        match request:
            case Push():
                return self._push(worker, request)
            case Average():
                return self._average(worker, request)
            case Gather() | Share() | Install():
                return self._meet(worker, request)
            case Draw():
                return [(worker, self._queue.draw(worker, request))]
            case Pull():
                self._refresh(worker)
                return [(worker, Released(self.ledger.version))]
            case Snapshot():
                self._refresh(worker)
                return [(worker, State(self._optimizers.dump(), self.ledger.version))]
            case ReadStats():
                return [(worker, Stats(self.ledger.stats()))]

    def note(self, worker: int, note: Note) -> Replies:
        """A note; it may set others free."""
        match note:
            case Paused():
                self.ledger.pause()
            case Resumed():
                self.ledger.resume()
            case Stopped():
                return self._stop_waiting_for(worker)
        return []

    def finished(self, worker: int) -> Replies:
        """The worker has done its job; a meeting that waits for it would wait for ever."""
        self._finished.add(worker)
        waiting = self._meeting.waiting
        return self._refuse(waiting, _missed(worker, waiting)) if waiting else []

    def lost(self, worker: int) -> Replies:
        """The worker is gone, with whatever it had not pushed."""
        self._members.discard(worker)
        self._meeting.leave(worker)
        self._pushes.pop(worker, None)
        freed: Replies = [*self._averaging.left(worker, self.store)]
        return freed + self._obey(Left(worker)) + self._close_meeting()

    # ---- rounds ---------------------------------------------------------------------------------

    def _push(self, worker: int, push: Push) -> Replies:
        if self._broken:
            return [(worker, Stop(now=True))]
        if (reason := self._objection(worker, push)) is not None:
            return self._refuse([worker], reason)
        self._pushes[worker] = push
        # A mini-batch that several optimizers use is counted by the first of them.
        self.ledger.pushed(worker, push.weight if push.optimizer == 0 else 0.0)
        freed: Replies = [*self._averaging.busy(worker, self.store)]
        return freed + self._obey(Pushed(worker))

    def _average(self, worker: int, request: Average) -> Replies:
        if self._broken:
            return [(worker, Stop(now=True))]
        assert self.store is not None, "parameters are shared before gradients are averaged"
        return [*self._averaging.ask(worker, request, self.store)]

    @property
    def _broken(self) -> bool:
        """Somebody has stopped under a lock-step policy: no round can be a whole one any more."""
        return self.policy.lockstep and bool(self._stopped)

    def _objection(self, worker: int, push: Push) -> str | None:
        """Why this push makes no sense, if so."""
        other = next((p.optimizer for p in self._pushes.values()), push.optimizer)
        if self.policy.lockstep and other != push.optimizer:
            return (
                f"worker {worker} steps optimizer {push.optimizer} while others step optimizer "
                f"{other}; in lock-step all workers must step their optimizers in the same order"
            )
        return self._optimizers.objection(worker, push)

    def _obey(self, fact: Fact) -> Replies:
        if self._broken:
            return []
        replies: Replies = []
        for order in self.policy.on(fact):
            match order:
                case Apply(workers):
                    self._apply(workers)
                case Release(workers):
                    replies += [self._release(worker) for worker in workers]
        return replies

    def _apply(self, workers: tuple[int, ...]) -> None:
        counted = self._optimizers.step({worker: self._pushes[worker] for worker in workers})
        self.ledger.updated(counted)

    def _release(self, worker: int) -> tuple[int, Reply]:
        self._pushes.pop(worker, None)
        self._averaging.back(worker)
        self._refresh(worker)
        self.ledger.released(worker)
        return worker, Released(self.ledger.version)

    def _refresh(self, worker: int) -> None:
        if self.store is not None:
            self.store.refresh(worker)
        self.ledger.read(worker)

    def _refuse(self, workers: Iterable[int], reason: str) -> Replies:
        """These workers and all who wait must end, with this reason."""
        waiting = {*workers, *self._pushes, *self._meeting.waiting, *self._averaging.waiting}
        self._pushes.clear()
        self._meeting.dissolve()
        self._averaging.dissolve()
        self._stopped |= waiting
        return [(each, Refused(reason)) for each in sorted(waiting)]

    # ---- meetings -------------------------------------------------------------------------------

    def _meet(self, worker: int, request: Gather | Share | Install) -> Replies:
        if self._stopped:
            return [(worker, Stop(now=True))]
        if self._finished:
            return self._refuse([worker], _missed(min(self._finished), [worker]))
        tag = request.tag if isinstance(request, Gather) else type(request).__name__
        try:
            self._meeting.bring(worker, tag, request)
        except MeetingMismatch as error:
            return self._refuse([worker], f"{error}; all workers must take the same path here")
        freed: Replies = [*self._averaging.busy(worker, self.store)]
        return freed + self._obey(Parked(worker)) + self._close_meeting()

    def _close_meeting(self) -> Replies:
        workers = sorted(self._meeting.waiting)
        requests = self._meeting.close()
        if requests is None:
            return []
        try:
            reply = self._conclude(workers, requests)
        except UserError as error:
            return self._refuse(workers, str(error))
        for worker in workers:
            self.policy.on(Joined(worker))
            self._averaging.back(worker)
        return [(worker, reply) for worker in workers]

    def _conclude(self, workers: list[int], requests: list[Request]) -> Reply:
        match requests[0]:
            case Gather():
                return Gathered(tuple(r.payload for r in requests if isinstance(r, Gather)))
            case Share():
                shares = [r for r in requests if isinstance(r, Share)]
                return self._share(dict(zip(workers, shares, strict=True)))
            case Install():
                return self._install(workers, requests[0])
        raise AssertionError(requests[0])

    def _share(self, shares: dict[int, Share]) -> Shared:
        first, share = next(iter(shares.items()))
        for worker, other in shares.items():
            if other != share:
                raise UserError(
                    f"worker {worker} has other parameters than worker {first}; every worker must "
                    "build the same module (same code, same seed, same configuration)"
                )
        n_workers, private = self.ledger.n_workers, not self.policy.lockstep
        self.store = Store(share.layout, n_workers, private, averaging=share.averaging)
        return Shared(self.store.arena.n_bytes)

    def _install(self, workers: list[int], install: Install) -> Done:
        assert self.store is not None, "parameters are shared before optimizers are installed"
        self._optimizers = Optimizers(load_updates(install.optimizers, self.store, self._pool))
        self.ledger.start(install.version)
        for worker in workers:
            self._refresh(worker)
        return Done()

    # ---- stopping -------------------------------------------------------------------------------

    def _stop_waiting_for(self, worker: int) -> Replies:
        """The worker has stopped: what others wait for together with it will not happen."""
        self._stopped.add(worker)
        waiting = set(self._meeting.waiting)
        self._meeting.dissolve()
        if self.policy.lockstep:
            waiting |= self._pushes.keys() | self._averaging.waiting
            self._pushes.clear()
            self._averaging.dissolve()
        return [(each, Stop(now=True)) for each in sorted(waiting - {worker})]

    def close(self) -> None:
        """End the threads of the update."""
        self._pool.close()


def _missed(worker: int, waiting: Iterable[int]) -> str:
    who = ", ".join(str(each) for each in sorted(waiting))
    return (
        f"worker {worker} has finished while worker {who} waits for all to meet; all workers must "
        "take the same path (a barrier or a reduction that only some reach?)"
    )
