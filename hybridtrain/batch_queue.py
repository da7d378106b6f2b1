"""The shared queue that free-running workers draw their mini-batches from.

Each pass over a loader is a list of stretches of the epoch's order. Whoever asks gets the next
positions, as many as make one of its mini-batches, so fast workers do more and nothing is drawn
twice. A full mini-batch, as far as there is one, is kept for every worker that has had none yet:
everybody takes part in every epoch, so that everybody reaches its end by the same path (validation,
metrics, checkpoints). Waiting at the end of an epoch is at most the mini-batch under way and the
one that Lightning fetches ahead to know which is the last.

What has been drawn is remembered until the push that stands for it has been answered. Loaders draw
ahead, so only this tells what a checkpoint has *not* seen, and what a lost worker leaves undone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridtrain.messages import Cover, Draw, Lap, Ticket
from hybridtrain.spans import Span, Spans, merged, split, total


@dataclass
class _Pass:
    """One pass over one loader."""

    left: Spans
    served: set[int] = field(default_factory=set)
    drawn: dict[int, list[Spans]] = field(default_factory=dict)  # and not trained on yet

    def give_back(self, worker: int) -> None:
        """What the worker has drawn is to be done by somebody."""
        undone = [span for spans in self.drawn.pop(worker, []) for span in spans]
        self.left = merged([*self.left, *undone])
        self.served.discard(worker)

    def unseen(self) -> Spans:
        """What nobody has trained on yet."""
        drawn: list[Span] = [s for each in self.drawn.values() for spans in each for s in spans]
        return merged([*self.left, *drawn])


@dataclass
class BatchQueue:
    """Hands out positions of every pass.

    Args:
        members: the workers that are alive; shared with the server.
    """

    members: set[int]
    _passes: dict[Lap, _Pass] = field(default_factory=dict)
    _covered: dict[int, list[Cover]] = field(default_factory=dict)

    def draw(self, worker: int, request: Draw) -> Ticket:
        """The worker's next mini-batch, or the end of its pass.

        Where there are fewer mini-batches than workers, those left over get a ticket that does not
        count: the worker runs the first samples and its gradient has no weight.
        """
        one = self._pass(request)
        if request.begins:
            one.give_back(worker)
        fresh = worker not in one.served
        one.served.add(worker)
        kept = 0 if fresh else sum(request.sizes[w] for w in self.members - one.served)
        size = request.sizes[worker]
        n = min(size, total(one.left) - kept)
        if n == size or (n > 0 and not request.drop_last):
            drawn, one.left = split(one.left, n)
            one.drawn.setdefault(worker, []).append(drawn)
            return Ticket(drawn)
        if fresh and _has_batches(request):
            return Ticket(((0, min(size, request.length)),), counts=False)
        return Ticket(())

    def _pass(self, request: Draw) -> _Pass:
        epoch = request.lap.epoch
        for lap in [lap for lap in self._passes if lap.epoch < epoch]:
            del self._passes[lap]  # everybody has met since
        return self._passes.setdefault(request.lap, _Pass(request.spans))

    def cover(self, worker: int, covers: tuple[Cover, ...]) -> None:
        """The push that the worker has just made stands for these draws."""
        self._covered.setdefault(worker, []).extend(covers)

    def settle(self, worker: int) -> None:
        """The worker's push has been answered: what it stands for is done."""
        for cover in self._covered.pop(worker, []):
            drawn = self._passes[cover.lap].drawn if cover.lap in self._passes else {}
            if cover.spans in drawn.get(worker, []):
                drawn[worker].remove(cover.spans)

    def lost(self, worker: int) -> None:
        """The worker is gone; what it had not done goes to the others."""
        self._covered.pop(worker, None)
        for one in self._passes.values():
            one.give_back(worker)

    def unseen(self) -> dict[Lap, Spans]:
        """What of each pass is not behind the parameters yet."""
        return {lap: one.unseen() for lap, one in self._passes.items()}


def _has_batches(request: Draw) -> bool:
    needed = min(request.sizes) if request.drop_last else 1
    return request.length >= needed
