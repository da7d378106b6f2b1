"""The shared queue that free-running workers draw their mini-batches from.

Each epoch of each loader is a counter: whoever asks gets the next mini-batch, so fast workers do
more and nothing is drawn twice. The last mini-batches are kept for workers that have had none yet:
everybody takes part in every epoch, so that everybody reaches its end by the same path
(validation, metrics, checkpoints). Waiting at the end of an epoch is at most the mini-batch under
way and the one that Lightning fetches ahead to know which is the last.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridtrain.messages import Draw, Ticket


@dataclass
class _Epoch:
    """One pass over one loader."""

    next: int = 0
    served: set[int] = field(default_factory=set)


@dataclass
class BatchQueue:
    """Hands out batch numbers 0, 1, … of every ``(loader, epoch)``.

    Args:
        members: the workers that are alive; shared with the server.
    """

    members: set[int]
    _epochs: dict[tuple[int, int], _Epoch] = field(default_factory=dict)

    def draw(self, worker: int, request: Draw) -> Ticket:
        """The worker's next mini-batch, or the end of its epoch.

        Where there are fewer mini-batches than workers, those left over get a ticket that does not
        count: the worker runs mini-batch 0 and its gradient has no weight.
        """
        epoch = self._epochs.setdefault((request.loader, request.epoch), _Epoch())
        fresh = worker not in epoch.served
        epoch.served.add(worker)
        unserved = len(self.members - epoch.served)
        left = request.n_batches - epoch.next
        if left > (0 if fresh else unserved):
            epoch.next += 1
            return Ticket(epoch.next - 1)
        return Ticket(0, counts=False) if fresh and request.n_batches > 0 else Ticket(None)
