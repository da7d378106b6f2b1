"""Membership: which workers are there, which are gone, and which will be restarted.

Theory of operation. A worker that is gone for good is removed from the policy, the meetings and the
queue. The others are told (``Gone``), because they do what it has left.

A worker that will be restarted is missing. In lock-step its place is kept: the policy waits for it,
so no update is made without it. The others wait for their release, or for a mean, at the step that
it has not done, and the new process begins with that step. Where workers run freely, nobody waits
for it. The world says when it is back and where it begins.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hybridtrain.protocol.messages import Back, Done, Gone, Install, Share, Shared
from hybridtrain.protocol.server_events import Removed
from hybridtrain.server.barrier import Barrier
from hybridtrain.server.batch_queue import BatchQueue
from hybridtrain.server.rounds import Replies, Rounds
from hybridtrain.server.run_statistics import RunStatistics


@dataclass
class Membership:
    """Keeps the list, and brings all who must know of a change to the same state.

    Args:
        members: the workers that are there or about to be; shared with the server.
        meeting: all of them expect each other there.
        queue: where mini-batches come from.
        rounds: steps.
        statistics: counts.
    """

    members: set[int]
    meeting: Barrier[Any]
    queue: BatchQueue
    rounds: Rounds
    statistics: RunStatistics
    missing: set[int] = field(default_factory=set)  # their processes have ended
    joining: set[int] = field(default_factory=set)  # there again, but have not pushed yet
    _some_left: bool = False

    # ---- going ----------------------------------------------------------------------------------

    def news_of(self, event: Removed) -> Replies:
        """The others hear who is gone, if they are to, and what it may have had a part in."""
        last = self.rounds.version if event.returns else self.rounds.last_part(event.worker)
        news = Gone(event.worker, last, for_now=event.returns)
        return self._news(news) if event.announced else []

    def remove(self, event: Removed) -> Replies:
        """The worker is gone, with whatever it had not pushed."""
        worker = event.worker
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
    def left(self) -> bool:
        """Whether workers that are gone have left something of the queue."""
        return self._some_left and self.queue.has_left(self.members - self.missing)

    # ---- coming ---------------------------------------------------------------------------------

    def admit(self, worker: int) -> Replies:
        """The worker is there (again), or what it did would not count: it begins (anew)."""
        self.members.add(worker)
        self.meeting.expected.add(worker)
        return self.rounds.admit(worker)

    def back(self, worker: int) -> None:
        """A new process begins as this worker; whoever comes to a meeting waits for it."""
        self._forget(worker)
        self.members.add(worker)
        self.joining.add(worker)
        self.meeting.expected.add(worker)

    def let_in(self, worker: int, request: Share | Install) -> Replies:
        """Parameters and optimizers are there; it trains from the newest."""
        assert self.rounds.store is not None, "only workers of a run that trains are restarted"
        if isinstance(request, Share):
            return [(worker, Shared(self.rounds.store.arena.n_bytes))]
        self.rounds.refresh(worker)
        freed = self.rounds.join(worker)
        self.statistics.comes(worker)
        version, missing = self.rounds.version, self.missing
        away = sorted({*range(self.statistics.n_workers)} - self.members | missing)
        # It may have heard of some, and forgets none by hearing twice.
        news = [(worker, Gone(each, version, for_now=each in missing)) for each in away]
        return [*news, (worker, Done()), *self._news(Back(worker)), *freed]
