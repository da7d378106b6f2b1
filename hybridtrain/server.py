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

import io
import time
from collections.abc import Callable

import torch

from hybridtrain.batch_queue import BatchQueue
from hybridtrain.events import Apply, Fact, Joined, Left, Parked, Pushed, Release
from hybridtrain.ledger import Ledger
from hybridtrain.meeting import Meeting, MeetingMismatch
from hybridtrain.memory import Layout, Store
from hybridtrain.messages import (
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
from hybridtrain.update import Contribution, Update, build_update
from hybridtrain.update.pool import Pool
from hybridtrain.update.portable import load

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
        self._updates: list[Update] = []
        self._pushes: dict[int, Push] = {}
        self._queue = BatchQueue(self._members)
        self._stopped: set[int] = set()
        for worker in range(n_workers):
            self.policy.on(Joined(worker))

    # ---- requests -------------------------------------------------------------------------------

    def handle(self, worker: int, request: Request) -> Replies:
        """One request in, replies out."""
        match request:
            case Push():
                return self._push(worker, request)
            case Gather() | Share() | Install():
                return self._meet(worker, request)
            case Draw():
                return [(worker, self._queue.draw(worker, request))]
            case Pull():
                self._refresh(worker)
                return [(worker, Released(self.ledger.version))]
            case Snapshot():
                self._refresh(worker)
                return [(worker, State(self._optimizer_states()))]
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

    def lost(self, worker: int) -> Replies:
        """The worker is gone, with whatever it had not pushed."""
        self._members.discard(worker)
        self._meeting.expected.discard(worker)
        self._pushes.pop(worker, None)
        return self._obey(Left(worker)) + self._close_meeting()

    # ---- rounds ---------------------------------------------------------------------------------

    def _push(self, worker: int, push: Push) -> Replies:
        if self.policy.lockstep and self._stopped:
            return [(worker, Stop(now=True))]  # the round can no longer be a whole one
        if not 0 <= push.optimizer < len(self._updates):
            return [(worker, Refused(f"there is no optimizer number {push.optimizer}"))]
        other = next((p.optimizer for p in self._pushes.values()), push.optimizer)
        if self.policy.lockstep and other != push.optimizer:
            return self._refuse_all(
                worker,
                f"worker {worker} steps optimizer {push.optimizer} while others step optimizer "
                f"{other}; in lock-step all workers must step their optimizers in the same order",
            )
        self._pushes[worker] = push
        self.ledger.pushed(worker, push.weight)
        return self._obey(Pushed(worker))

    def _obey(self, fact: Fact) -> Replies:
        replies: Replies = []
        for order in self.policy.on(fact):
            match order:
                case Apply(workers):
                    self._apply(workers)
                case Release(workers):
                    replies += [self._release(worker) for worker in workers]
        return replies

    def _apply(self, workers: tuple[int, ...]) -> None:
        pushes = {worker: self._pushes[worker] for worker in workers}
        total = sum(push.weight for push in pushes.values())
        if total > 0:
            self._step(pushes, total)
        self.ledger.updated(tuple(w for w, push in pushes.items() if push.weight > 0))

    def _step(self, pushes: dict[int, Push], total: float) -> None:
        lead = next(iter(pushes.values()))
        update = self._updates[lead.optimizer]
        for push in pushes.values():
            if push.groups is not None:
                update.set_groups(push.groups)
                break
        contributions = [
            Contribution(worker, push.weight / total, frozenset(push.absent))
            for worker, push in pushes.items()
            if push.weight > 0
        ]
        with torch.no_grad():
            update.step(contributions, lead.clip)

    def _release(self, worker: int) -> tuple[int, Reply]:
        self._pushes.pop(worker, None)
        self._refresh(worker)
        self.ledger.released(worker)
        return worker, Released(self.ledger.version)

    def _refresh(self, worker: int) -> None:
        if self.store is not None:
            self.store.refresh(worker)
        self.ledger.read(worker)

    def _refuse_all(self, worker: int, reason: str) -> Replies:
        waiting = {worker, *self._pushes, *self._meeting.waiting}
        self._pushes.clear()
        self._meeting.dissolve()
        return [(each, Refused(reason)) for each in sorted(waiting)]

    # ---- meetings -------------------------------------------------------------------------------

    def _meet(self, worker: int, request: Gather | Share | Install) -> Replies:
        if self._stopped:
            return [(worker, Stop(now=True))]
        tag = request.tag if isinstance(request, Gather) else type(request).__name__
        try:
            self._meeting.bring(worker, tag, request)
        except MeetingMismatch as error:
            return self._refuse_all(worker, f"{error}; all workers must take the same path here")
        return self._obey(Parked(worker)) + self._close_meeting()

    def _close_meeting(self) -> Replies:
        workers = sorted(self._meeting.waiting)
        requests = self._meeting.close()
        if requests is None:
            return []
        match requests[0]:
            case Gather():
                payloads = tuple(r.payload for r in requests if isinstance(r, Gather))
                return self._reply_all(workers, Gathered(payloads))
            case Share():
                return self._share(workers, [r.layout for r in requests if isinstance(r, Share)])
            case Install():
                return self._install(workers, requests[0])
        raise AssertionError(requests[0])

    def _reply_all(self, workers: list[int], reply: Reply) -> Replies:
        for worker in workers:
            self.policy.on(Joined(worker))
        return [(worker, reply) for worker in workers]

    def _share(self, workers: list[int], layouts: list[Layout]) -> Replies:
        for worker, layout in zip(workers, layouts, strict=True):
            if layout != layouts[0]:
                return self._refuse_all(
                    worker,
                    f"worker {worker} has other parameters than worker 0; every worker must build "
                    "the same module (same code, same seed, same configuration)",
                )
        self.store = Store(layouts[0], len(workers), not self.policy.lockstep)
        return self._reply_all(workers, Shared(self.store.arena.n_bytes))

    def _install(self, workers: list[int], install: Install) -> Replies:
        store = self.store
        assert store is not None, "parameters are shared before optimizers are installed"
        self._updates = []
        for payload in install.optimizers:
            optimizer, numbers = load(
                payload,
                lambda n: torch.nn.Parameter(
                    store.master(store.layout.slots[n]), requires_grad=True
                ),
            )
            self._updates.append(build_update(optimizer, numbers, store, self._pool))
        for worker in workers:
            self._refresh(worker)
        self.ledger.start()
        return self._reply_all(workers, Done())

    # ---- stopping -------------------------------------------------------------------------------

    def _stop_waiting_for(self, worker: int) -> Replies:
        """The worker has stopped: what others wait for together with it will not happen."""
        self._stopped.add(worker)
        waiting = set(self._meeting.waiting)
        self._meeting.dissolve()
        if self.policy.lockstep:
            waiting |= self._pushes.keys()
            self._pushes.clear()
        return [(each, Stop(now=True)) for each in sorted(waiting - {worker})]

    def close(self) -> None:
        """End the threads of the update."""
        self._pool.close()

    def _optimizer_states(self) -> bytes:
        buffer = io.BytesIO()
        torch.save([update.state() for update in self._updates], buffer)
        return buffer.getvalue()
