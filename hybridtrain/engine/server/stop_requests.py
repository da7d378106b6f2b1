"""Workers that want training to end within an epoch.

If all want it at the same step, training ends there. If only some do, the others have begun the
next step by then: in lock-step the wishing workers take that step, too, and all end after it. So
the server answers a wish when all workers have it, or as soon as another worker continues.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridtrain.engine.protocol.messages import (
    Average,
    Begin,
    Gather,
    Gathered,
    Install,
    Note,
    Push,
    Request,
    Share,
    StillWaits,
    Stop,
)
from hybridtrain.engine.server.rounds import Replies
from hybridtrain.engine.server.run_statistics import RunStatistics


@dataclass
class StopRequests:
    """The wishes that are not answered yet.

    Args:
        members: the workers that train; shared with the server.
        statistics: counts updates.
        whole_rounds: all workers take the same steps.
    """

    members: set[int]
    statistics: RunStatistics
    whole_rounds: bool
    _payloads: dict[int, bytes] = field(default_factory=dict)

    def take(self, worker: int, request: Gather, others_wait: bool) -> Replies:
        """The worker wants to stop; ``others_wait``: some have continued already."""
        self._payloads[worker] = request.payload
        if others_wait or not self.whole_rounds:
            return self.answer()
        if not self._payloads.keys() >= self.members:
            return []
        workers = tuple(sorted(self._payloads))
        payloads = tuple(self._payloads[each] for each in workers)
        self._payloads.clear()
        return [(worker, Gathered(payloads, workers)) for worker in workers]

    def answer(self) -> Replies:
        """A worker continues, or will never answer: tell all workers of the wish, if any."""
        if not self._payloads:
            return []
        behind = self.statistics.version + 1 if self.whole_rounds else 0
        told: Replies = [(worker, Stop(behind=behind)) for worker in sorted(self.members)]
        known, self._payloads = self._payloads, {}
        return told + [(w, Gathered((payload,), (w,))) for w, payload in sorted(known.items())]

    def observe(self, message: Request | Note) -> Replies:
        """Answer the wishes if this message shows that its worker has continued."""
        if not self._payloads:  # nearly always
            return []
        goes_on = isinstance(
            message, Push | Average | Begin | Gather | Share | Install | StillWaits
        )
        return self.answer() if goes_on else []
