"""Membership: which workers train, are gone, or will be restarted.

Theory of operation. A worker that is gone for good is removed from the policy, the meetings and the
queue. The server tells the others (``Gone``), because they process its remaining samples.

A worker that will be restarted is missing. In lock-step the policy waits for it, so no update is
made without it: the others wait for their release, or for a mean, and the new process begins with
the step that they wait in. Free-running workers do not wait for it. The world reports when it is
back and where it begins.

In lock-step a worker that was not there, or gone for good, comes at the next meeting that admits
it, at the beginning of an epoch. From then on it is missing, as one that is to be restarted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hybridtrain.engine.protocol.events import Removed
from hybridtrain.engine.protocol.messages import Back, Done, Gone, Install, Share, Shared
from hybridtrain.engine.server.barrier import Barrier
from hybridtrain.engine.server.batch_queue import BatchQueue
from hybridtrain.engine.server.rounds import Replies, Rounds
from hybridtrain.engine.server.run_statistics import RunStatistics


@dataclass
class Membership:
    """Keeps the set of workers, and updates all parts that depend on it.

    Args:
        members: the workers that train or will; shared with the server.
        meeting: expects all of them.
        queue: of mini-batches.
        rounds: of pushes.
        statistics: counts.
    """

    members: set[int]
    meeting: Barrier[Any]
    queue: BatchQueue
    rounds: Rounds
    statistics: RunStatistics
    missing: set[int] = field(default_factory=set)  # to be restarted
    joining: set[int] = field(default_factory=set)  # restarted, without a push so far
    coming: set[int] = field(default_factory=set)  # in lock-step, until a meeting admits them
    _some_left: bool = False

    # ---- going ----------------------------------------------------------------------------------

    def news_of(self, event: Removed) -> Replies:
        """Tell the others of the loss, if announced, and of the worker's last update."""
        last = self.rounds.version if event.returns else self.rounds.last_part(event.worker)
        news = Gone(event.worker, last, for_now=event.returns)
        return self._news(news) if event.announced else []

    def remove(self, event: Removed) -> Replies:
        """Remove the worker, and what it had not pushed."""
        worker = event.worker
        if self.rounds.requirements.whole_rounds and worker not in self.members:
            self.coming = self.coming | {worker} if event.returns else self.coming - {worker}
            return []
        if event.returns:
            self._away(worker)
            self.missing.add(worker)
            return self.rounds.miss(worker)
        self.members.discard(worker)
        self._away(worker)
        return self.rounds.lost(worker)

    def _news(self, news: Gone | Back) -> Replies:
        others = self.members - self.missing - {news.worker}
        return [(other, news) for other in sorted(others)]

    def _away(self, worker: int) -> None:
        self._forget(worker)
        self._some_left = True
        self.meeting.leave(worker)
        self.rounds.settle_held(worker)
        self.rounds.count_untold(worker)
        if samples := self.queue.lost(worker):
            self.statistics.dropped(worker, samples)

    def _forget(self, worker: int) -> None:
        self.missing.discard(worker)
        self.joining.discard(worker)

    @property
    def remaining(self) -> bool:
        """Whether lost workers have left mini-batches in the queue."""
        return self._some_left and self.queue.has_left(self.members - self.missing)

    # ---- coming ---------------------------------------------------------------------------------

    def take_in(self) -> Replies:
        """All workers meet, and from here on wait for those that are coming: tell them."""
        coming, self.coming = sorted(self.coming), set()
        freed: Replies = []
        for worker in coming:
            self.members.add(worker)
            self.missing.add(worker)
            freed += self.rounds.miss(worker)
        news = [Gone(worker, self.rounds.version, for_now=True) for worker in coming]
        return [pair for each in news for pair in self._news(each)] + freed

    def admit(self, worker: int) -> Replies:
        """The worker begins (anew) with the newest parameters."""
        self.members.add(worker)
        self.meeting.expected.add(worker)
        return self.rounds.admit(worker)

    def back(self, worker: int) -> None:
        """A new process runs as this worker; meetings wait for it."""
        self._forget(worker)
        self.members.add(worker)
        self.joining.add(worker)
        self.meeting.expected.add(worker)

    def let_in(self, worker: int, request: Share | Install) -> Replies:
        """Answer a restarted worker's setup: it trains from the newest parameters."""
        assert self.rounds.store is not None, "only workers of a run that trains are restarted"
        if isinstance(request, Share):
            return [(worker, Shared(self.rounds.store.arena.n_bytes))]
        if self.rounds.store.turns is None:  # else it reads what the others compute with
            self.rounds.refresh(worker)
        freed = self.rounds.join(worker)
        self.statistics.comes(worker)
        version, missing = self.rounds.version, self.missing
        away = sorted({*range(self.statistics.n_workers)} - self.members | missing)
        # It may know of some; a second notice does no harm.
        news = [(worker, Gone(each, version, for_now=each in missing)) for each in away]
        return [*news, (worker, Done()), *self._news(Back(worker)), *freed]
