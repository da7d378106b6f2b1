"""Mini-batches from the shared queue, for workers that run freely."""

from __future__ import annotations

from collections.abc import Iterator

from hybridtrain.lightning.data.samplers import EpochSampler
from hybridtrain.protocol.messages import Draw, DrawnBatch, LoaderPass
from hybridtrain.protocol.spans import Spans, positions, total


class QueueSampler(EpochSampler):
    """Mini-batches drawn one by one from the server's queue. It has no length, on purpose.

    Lightning believes a length, and would miss validation and the last step if it were only an
    upper bound.
    """

    _reopened = False  # the next iteration does what workers that are gone have left

    def go_on(self, crew: tuple[int, ...], spans: Spans) -> None:
        """The next iteration draws what is left of the current pass."""
        super().go_on(crew, spans)
        self._reopened = True

    def __iter__(self) -> Iterator[int]:
        order, spans, batches = self._begin()
        lap, begins = LoaderPass(self.number, self.epoch, self._lap), True
        plan, n_drawn, fills = self.plan, self.batch_size, self.plan.fills()
        turn = 0 if self._reopened else plan.turn()  # of what is left over nothing is dealt
        self._reopened = False
        # The loader makes mini-batches by counting, so a smaller one must be the last.
        while n_drawn == self.batch_size:
            ask = Draw(
                lap, spans, len(order), plan.sizes, plan.drop_last, begins, turn, fills, plan.visits
            )
            ticket = self._client.draw(ask)
            begins, batches, n_drawn = False, batches + 1, total(ticket.spans)
            if ticket.counts:
                self._plan_next(n_drawn, batches, 0, DrawnBatch(lap, ticket.spans))
            else:
                self._plan_next(0, batches, 0, None)
            yield from (order[position] for position in positions(ticket.spans))
        self.ended = True
