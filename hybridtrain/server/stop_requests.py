"""Workers that want training to end, in the midst of an epoch.

If all want it at the same step, training ends there. If only some do, the others are a step ahead
when that is known: in lock-step those who wish take that step, too, and all end behind it. So the
wish is answered when all have it, or as soon as another worker goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridtrain.protocol.messages import (
    Average,
    Begin,
    Gather,
    Gathered,
    Install,
    Note,
    Push,
    Reply,
    Request,
    Share,
    Stop,
)
from hybridtrain.server.run_statistics import RunStatistics

Replies = list[tuple[int, Reply]]


@dataclass
class StopRequests:
    """Of those who wait to hear whether all want it.

    Args:
        members: the workers that are there; shared with the server.
        statistics: counts updates.
        whole_rounds: all take the same steps.
    """

    members: set[int]
    statistics: RunStatistics
    whole_rounds: bool
    _payloads: dict[int, bytes] = field(default_factory=dict)

    def take(self, worker: int, request: Gather, others_wait: bool) -> Replies:
        """The worker wants to stop; ``others_wait``: some have gone on already."""
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
        """Somebody goes on, or will never answer: all hear of the wish, if there is one."""
        if not self._payloads:
            return []
        behind = self.statistics.version + 1 if self.whole_rounds else 0
        told: Replies = [(worker, Stop(behind=behind)) for worker in sorted(self.members)]
        known, self._payloads = self._payloads, {}
        return told + [(w, Gathered((payload,), (w,))) for w, payload in sorted(known.items())]

    def hears(self, message: Request | Note) -> Replies:
        """What a worker asks for that does not wish may show that it has gone on."""
        if not self._payloads:  # nearly always
            return []
        goes_on = isinstance(message, Push | Average | Begin | Gather | Share | Install)
        return self.answer() if goes_on else []
