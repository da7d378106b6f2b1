"""Mini-batches that are dealt: each position once, whoever goes and comes back."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridtrain.engine.protocol.messages import Draw, DrawnBatch, LoaderPass, Ticket
from hybridtrain.engine.protocol.spans import Spans, merged, positions, total
from hybridtrain.engine.server.batch_queue import BatchQueue

LAP = LoaderPass(0, 0)


class Crowd:
    """Workers that draw, train on what they have drawn, are lost, and come back."""

    def __init__(self, length: int, sizes: tuple[int, ...], turn: int = 1) -> None:
        self.members = set(range(len(sizes)))
        self.queue = BatchQueue(self.members)
        self.ask = Draw(LAP, ((0, length),), length, sizes, batches_per_turn=turn)
        self.held: dict[int, list[Spans]] = {worker: [] for worker in self.members}
        self.fresh, self.ended = set(self.members), set[int]()
        self.trained: list[int] = []

    def draw(self, worker: int) -> Ticket:
        """The worker fetches a mini-batch; a smaller one is its last."""
        ticket = self.queue.draw(worker, replace(self.ask, begins=worker in self.fresh))
        self.fresh.discard(worker)
        if ticket.spans:
            self.held[worker].append(ticket.spans)
        if total(ticket.spans) < self.ask.sizes[worker]:
            self.ended.add(worker)
        return ticket

    def train(self, worker: int) -> None:
        """Its oldest mini-batch is part of an update."""
        spans = self.held[worker].pop(0)
        self.queue.settle(worker, (DrawnBatch(LAP, spans),))
        self.trained += positions(spans)

    def lose(self, worker: int) -> None:
        self.members.discard(worker)
        self.queue.lost(worker)
        self.held[worker].clear()

    def come_back(self, worker: int) -> None:
        """As another process, which begins the pass anew."""
        self.members.add(worker)
        self.fresh.add(worker)
        self.ended.discard(worker)

    def end(self) -> None:
        """All go on, as long as there is anything; what is left over is open to all."""
        for turn in (self.ask.batches_per_turn, 0):
            self.ask = replace(self.ask, batches_per_turn=turn)
            while any(self.held.values()) or self.members - self.ended:
                for worker in sorted(self.members - self.ended):
                    self.draw(worker)
                for worker in sorted(self.members):
                    while self.held[worker]:
                        self.train(worker)
            self.ended.clear()
            self.fresh |= self.members


@pytest.mark.parametrize("lost", [(1,), (1, 2), (0, 1, 2)])
def test_who_comes_back_goes_on_with_what_it_was_dealt_and_repeats_nothing(
    lost: tuple[int, ...],
) -> None:
    crowd = Crowd(24, (2, 2, 2))
    for worker in (0, 1, 2):
        crowd.draw(worker)
        crowd.draw(worker)
        crowd.train(worker)
    for worker in lost:
        crowd.lose(worker)
    for worker in lost:
        crowd.come_back(worker)
        start = 6 + 2 * worker
        assert crowd.draw(worker).spans == ((start, start + 2),), "had been fetched ahead"
    crowd.end()
    assert sorted(crowd.trained) == list(range(24))


def test_who_comes_back_is_told_of_another_rest_than_was_dealt() -> None:
    crowd = Crowd(24, (2, 2, 2))
    for worker in (0, 1, 2):
        crowd.draw(worker)
        crowd.train(worker)
    crowd.lose(1)
    crowd.come_back(1)
    crowd.ask = replace(crowd.ask, spans=((3, 24),))
    assert crowd.draw(1).spans == ((8, 10),)
    crowd.ask = replace(crowd.ask, spans=((0, 24),))
    crowd.end()
    assert sorted(crowd.trained) == list(range(24))


def test_nothing_is_left_for_who_comes_back_when_the_others_have_done_it() -> None:
    crowd = Crowd(12, (2, 2))
    crowd.lose(1)
    crowd.end()
    assert sorted(crowd.trained) == list(range(12))
    crowd.come_back(1)
    crowd.ask = replace(crowd.ask, batches_per_turn=1)
    assert crowd.draw(1) == Ticket(())


def test_a_mini_batch_is_made_of_pieces_if_the_others_have_done_parts_of_it() -> None:
    crowd = Crowd(24, (4, 4))
    crowd.lose(1)
    for start in (0, 8, 16):
        assert crowd.draw(0).spans == ((start, start + 4),)
        crowd.train(0)
    crowd.ask = replace(crowd.ask, sizes=(2, 4), batches_per_turn=0)
    crowd.fresh.add(0)
    assert crowd.draw(0).spans == ((4, 6),), "of what is left over"
    crowd.ask = replace(crowd.ask, sizes=(4, 4), batches_per_turn=1)
    crowd.come_back(1)
    assert crowd.draw(1).spans == ((6, 8), (12, 14))
    assert crowd.draw(1).spans == ((14, 16), (20, 22))
    assert crowd.draw(1).spans == ((22, 24),)
    assert crowd.draw(1) == Ticket(())


@pytest.mark.wide
@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple),
    length=st.integers(0, 40),
    cuts=st.lists(st.integers(0, 40), max_size=4),
    turn=st.integers(1, 3),
    seed=st.integers(0, 2**16),
    steps=st.integers(0, 60),
)
def test_each_position_is_done_once_whoever_goes_and_comes_back(
    sizes: tuple[int, ...], length: int, cuts: list[int], turn: int, seed: int, steps: int
) -> None:
    ends = sorted({min(cut, length) for cut in cuts})
    spans = merged(zip(ends[::2], ends[1::2], strict=False)) if cuts else ((0, length),)
    crowd, dice = Crowd(length, sizes, turn), random.Random(seed)
    crowd.ask = replace(crowd.ask, spans=spans)
    for _ in range(steps):
        worker = dice.randrange(len(sizes))
        what = dice.choices(("draw", "train", "lose"), (6, 5, 1))[0]
        if worker not in crowd.members:
            crowd.come_back(worker)
        elif what == "draw" and worker not in crowd.ended:
            crowd.draw(worker)
        elif what == "train" and crowd.held[worker]:
            crowd.train(worker)
        elif what == "lose":
            crowd.lose(worker)
    for worker in set(range(len(sizes))) - crowd.members:
        crowd.come_back(worker)
    crowd.end()
    assert sorted(crowd.trained) == list(positions(spans)), "nothing twice, nothing lost"


def test_a_pass_of_an_earlier_epoch_has_nothing_more() -> None:
    queue, ask = BatchQueue({0, 1}), Draw(LAP, ((0, 8),), 8, (4, 4), begins=True)
    drawn = [queue.draw(worker, ask).spans for worker in (0, 1)]
    for worker, spans in enumerate(drawn):
        queue.settle(worker, (DrawnBatch(LAP, spans),))
    assert queue.draw(0, replace(ask, lap=LoaderPass(0, 1))).spans == ((0, 4),)
    queue.lost(1)
    assert queue.draw(1, ask) == Ticket(()), "what it was told is older than the others' epoch"
    assert queue.draw(1, replace(ask, lap=LoaderPass(0, 1))).spans == ((4, 8),)
