"""The shared queue of mini-batches: each position drawn once, everybody served."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridtrain.engine.protocol.messages import (
    Draw,
    DrawnBatch,
    LoaderPass,
    StepRequest,
    Ticket,
    Visits,
)
from hybridtrain.engine.protocol.spans import Spans, merged, positions, split, total
from hybridtrain.engine.server.batch_queue import BatchQueue, end_sooner

FIRST = LoaderPass(0, 0)


def draw(
    length: int,
    sizes: tuple[int, ...],
    lap: LoaderPass = FIRST,
    spans: Spans | None = None,
    drop_last: bool = False,
    begins: bool = False,
) -> Draw:
    return Draw(lap, ((0, length),) if spans is None else spans, length, sizes, drop_last, begins)


def test_whoever_asks_gets_the_next_positions_so_the_fast_do_more() -> None:
    queue, ask = BatchQueue({0, 1}), draw(9, (2, 2))
    drawn = [queue.draw(0, ask).spans for _ in range(5)]
    assert drawn == [((0, 2),), ((2, 4),), ((4, 6),), ((6, 7),), ()], "two are kept for worker 1"
    assert queue.draw(1, ask) == Ticket(((7, 9),))
    assert queue.draw(1, ask) == Ticket(())


def test_everybody_draws_mini_batches_of_its_own_size() -> None:
    queue, ask = BatchQueue({0, 1}), draw(12, (4, 1))
    assert queue.draw(1, ask) == Ticket(((0, 1),))
    assert queue.draw(0, ask) == Ticket(((1, 5),))
    assert queue.draw(1, ask) == Ticket(((5, 6),))
    assert queue.draw(0, ask) == Ticket(((6, 10),))
    assert queue.draw(0, ask) == Ticket(((10, 12),))


@pytest.mark.parametrize("fills", [False, True])
def test_with_fewer_batches_than_workers_the_first_has_one_and_those_left_over_none(
    fills: bool,
) -> None:
    queue, ask = BatchQueue({0, 1, 2}), replace(draw(3, (4, 4, 2)), fills=fills)
    filler = Ticket(((0, 2),), counts=False) if fills else Ticket(())
    assert queue.draw(2, ask) == filler
    assert queue.draw(0, ask) == Ticket(((0, 3),))
    filler = Ticket(((0, 3),), counts=False) if fills else Ticket(())
    assert queue.draw(1, ask) == filler
    assert [queue.draw(w, ask).spans for w in range(3)] == [(), (), ()]


def pair(length: int, sizes: tuple[int, ...], **options: Any) -> tuple[Draw, Draw]:
    one = replace(draw(length, sizes), several=True, **options)
    return one, replace(one, lap=LoaderPass(1, 0))


def test_loaders_that_are_alike_give_the_same_positions_in_each_step() -> None:
    queue, (one, other) = BatchQueue({0, 1}), pair(9, (2, 2))
    begun = [replace(each, begins=True) for each in (one, other)]
    first = queue.draw(0, begun[0])
    assert queue.draw(1, begun[1]) == queue.draw(1, begun[0]), "any loader may be asked first"
    drawn = [queue.draw(0, one) for _ in range(2)]  # by a loader that fetches ahead
    assert [queue.draw(0, each) for each in (begun[1], other, other)] == [first, *drawn]
    left = queue.unseen()
    assert left[FIRST] == left[other.lap]


def test_loaders_that_are_alike_are_drawn_from_anew_in_a_new_iteration() -> None:
    queue, (one, other) = BatchQueue({0}), pair(6, (2,))
    begun = [replace(each, begins=True) for each in (one, other)]
    drawn = [queue.draw(0, each) for each in (*begun, one, *begun, one, other)]
    assert drawn[3:] == [drawn[0], drawn[1], Ticket(((2, 4),)), Ticket(((2, 4),))]
    assert set(queue.unseen().values()) == {((0, 6),)}


def test_several_mini_batches_drawn_at_once_are_those_of_all_loaders() -> None:
    queue, (one, other) = BatchQueue({0}), pair(40, (1,), most=8)
    for step in range(2):
        begins = step == 0
        tickets = [queue.draw(0, replace(each, begins=begins)) for each in (one, other)]
        assert tickets[0] == tickets[1]
        queue.settle(0, tuple(DrawnBatch(each.lap, tickets[0].spans) for each in (one, other)))
    assert tickets[0].more
    left = queue.unseen()
    assert left[FIRST] == left[other.lap] == ((2, 40),)
    queue.lost(0)
    assert queue.draw(0, replace(other, begins=True)).spans == ((2, 3),)


def test_the_first_of_several_loaders_drawn_from_together_decides_whether_something_is_left() -> (
    None
):
    queue, (one, other) = BatchQueue({0, 1}), pair(2, (1, 1))
    for worker in (0, 1):
        queue.draw(worker, replace(one, begins=True))
    queue.draw(0, replace(other, begins=True))  # worker 1 has yet to draw its own
    assert not queue.has_left({0, 1})


def test_a_worker_that_comes_back_may_begin_with_any_loader() -> None:
    queue, (one, other) = BatchQueue({0, 1}), pair(8, (1, 1))
    begun = [replace(each, begins=True) for each in (one, other)]
    first = queue.draw(0, begun[0])
    queue.lost(0)
    assert queue.draw(1, begun[0]) == first, "it has been given back"
    assert queue.draw(0, begun[1]) != first


@pytest.mark.parametrize(
    ("most", "limited", "n_more"), [(1, False, 0), (3, False, 2), (3, True, 0)]
)
def test_several_mini_batches_are_drawn_at_once_unless_there_is_a_limit(
    most: int, limited: bool, n_more: int
) -> None:
    queue, ask = BatchQueue({0}), replace(draw(40, (1,)), most=most, limited=limited)
    assert train(queue, 0, ask)
    assert len(queue.draw(0, ask).more) == n_more


def test_work_that_was_dropped_shows_how_fast_a_worker_is() -> None:
    queue, ask = BatchQueue({0}), replace(draw(40, (1,)), most=3)
    queue.give_back(0, (DrawnBatch(FIRST, queue.draw(0, ask).spans),))
    assert queue.draw(0, ask).more


@pytest.mark.parametrize("unlike", [{"length": 8, "spans": ((0, 8),)}, {"drop_last": True}])
def test_loaders_that_differ_are_drawn_from_on_their_own(unlike: dict[str, Any]) -> None:
    queue, (one, other) = BatchQueue({0, 1}), pair(9, (2, 2))
    other = replace(other, **unlike)
    assert queue.draw(0, one) == Ticket(((0, 2),))
    assert queue.draw(1, other) == Ticket(((0, 2),))
    assert queue.draw(1, one) == Ticket(((2, 4),))


def test_steps_of_a_lost_worker_that_the_server_does_not_know_have_all_their_loaders() -> None:
    queue, (one, other) = BatchQueue({0, 1}, covered=lambda worker: 4), pair(8, (1, 1))
    for step in range(3):
        for each in (one, other):
            queue.draw(0, replace(each, begins=step == 0))
    assert [(each.lap, each.spans) for each in queue.untold(0)] == [
        (each.lap, ((step, step + 1),)) for step in range(2) for each in (one, other)
    ]


def test_no_mini_batch_is_kept_for_the_first_worker_while_it_is_away() -> None:
    queue, ask = BatchQueue({0, 1}), draw(6, (4, 4))
    assert queue.draw(0, ask).spans == ((0, 4),)
    assert queue.draw(1, ask).spans == ((4, 6),)
    queue.lost(0)
    assert queue.draw(1, replace(ask, begins=True)).spans == ((0, 4),), "nobody waits for it"


def train(queue: BatchQueue, worker: int, ask: Draw) -> bool:
    """One mini-batch, if there is one for the worker."""
    spans = queue.draw(worker, ask).spans
    queue.settle(worker, (DrawnBatch(ask.lap, spans),))
    return bool(spans)


def test_no_mini_batch_is_kept_for_faster_workers_while_they_are_away() -> None:
    queue, ask = BatchQueue({0, 1, 2}), draw(40, (2, 2, 2))
    order = [0, *[1, 2] * 8]
    assert all(train(queue, worker, ask) for worker in order)
    again = replace(ask, begins=True)
    assert not train(queue, 0, again), "they would be sooner"
    queue.lost(1)
    queue.lost(2)
    assert train(queue, 0, again), "they are to come back, when somebody has made a step"


def test_an_ended_epoch_has_nothing_left_when_the_next_one_has_begun() -> None:
    queue, ask = BatchQueue({0, 1}), draw(4, (2, 2))
    assert train(queue, 0, ask) and train(queue, 1, ask)
    following = replace(ask, lap=LoaderPass(0, 1))
    assert train(queue, 1, following)
    queue.lost(0)
    queue.lost(1)
    assert not train(queue, 0, replace(ask, begins=True)), "it goes on from the epoch before"
    assert not queue.has_left({0})
    assert train(queue, 0, following) and not queue.has_left({0})


def test_what_only_those_who_are_away_could_draw_is_not_left_to_the_others() -> None:
    queue, ask = BatchQueue({0, 1}), draw(7, (4, 1), drop_last=True)
    assert train(queue, 0, ask)
    queue.lost(1)
    assert not train(queue, 0, ask)
    assert not queue.has_left({0}) and queue.has_left({0, 1})


def test_drop_last_never_hands_out_a_smaller_mini_batch() -> None:
    queue, ask = BatchQueue({0, 1}), draw(13, (4, 4), drop_last=True)
    drawn = [queue.draw(w, ask) for w in (0, 0, 0, 1, 1)]
    assert [total(t.spans) for t in drawn] == [4, 4, 0, 4, 0]
    too_few = BatchQueue({0, 1})
    assert too_few.draw(0, draw(3, (4, 4), drop_last=True)) == Ticket(())


def test_an_epoch_without_samples_ends_at_once() -> None:
    assert BatchQueue({0}).draw(0, draw(0, (4,))) == Ticket(())


def test_a_rest_that_is_in_pieces_is_drawn_across_the_gaps() -> None:
    queue, ask = BatchQueue({0}), draw(20, (4,), spans=((3, 5), (9, 15)))
    assert queue.draw(0, ask) == Ticket(((3, 5), (9, 11)))
    assert queue.draw(0, ask) == Ticket(((11, 15),))
    assert queue.draw(0, ask) == Ticket(())


def test_a_rest_of_nothing_lets_everybody_reach_the_end_of_the_epoch() -> None:
    queue, ask = BatchQueue({0, 1}), replace(draw(20, (4, 4), spans=()), fills=True)
    assert [queue.draw(w, ask).counts for w in (0, 1)] == [False, False]
    assert [queue.draw(w, ask).spans for w in (0, 1)] == [(), ()]


def test_epochs_laps_and_loaders_are_counted_apart() -> None:
    queue = BatchQueue({0})
    for lap in (LoaderPass(0, 0), LoaderPass(0, 0, 1), LoaderPass(1, 0), LoaderPass(0, 1)):
        ask = draw(2, (2,), lap)
        assert [queue.draw(0, ask).spans for _ in range(2)] == [((0, 2),), ()]


def test_no_batch_is_kept_for_a_lost_worker() -> None:
    members = {0, 1}
    queue, ask = BatchQueue(members), draw(4, (2, 2))
    assert queue.draw(0, ask).spans == ((0, 2),)
    members.discard(1)
    queue.lost(1)
    assert queue.draw(0, ask).spans == ((2, 4),)


def test_what_is_drawn_is_unseen_until_the_push_that_covers_it_is_answered() -> None:
    queue, ask = BatchQueue({0}), draw(6, (2,))
    first, _ = queue.draw(0, ask), queue.draw(0, ask)
    assert queue.unseen() == {LoaderPass(0, 0): ((0, 6),)}
    assert queue.unseen() == {LoaderPass(0, 0): ((0, 6),)}
    queue.settle(0, (DrawnBatch(LoaderPass(0, 0), first.spans),))
    assert queue.unseen() == {LoaderPass(0, 0): ((2, 6),)}


def test_what_a_lost_worker_has_not_done_goes_to_the_others() -> None:
    members = {0, 1}
    queue, ask = BatchQueue(members), draw(8, (2, 2))
    done, _ = queue.draw(1, ask), queue.draw(1, ask)
    queue.settle(1, (DrawnBatch(LoaderPass(0, 0), done.spans),))
    members.discard(1)
    queue.lost(1)
    assert [queue.draw(0, ask).spans for _ in range(4)] == [((2, 4),), ((4, 6),), ((6, 8),), ()]


def test_a_pass_that_begins_anew_gives_back_what_was_fetched_ahead() -> None:
    queue = BatchQueue({0})
    queue.draw(0, draw(4, (2,), begins=True))
    assert queue.draw(0, draw(4, (2,), begins=True)).spans == ((0, 2),)
    assert queue.draw(0, draw(4, (2,))).spans == ((2, 4),)


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("sizes", [(4, 4), (4, 2)])
def test_what_drop_last_leaves_over_is_not_left_to_be_made_up_for(
    sizes: tuple[int, ...], turn: int
) -> None:
    members = {0, 1}
    ask = replace(draw(sum(sizes) + 6, sizes, drop_last=True), batches_per_turn=turn)
    queue = BatchQueue(members)
    for worker in (0, 1):
        queue.settle(worker, (DrawnBatch(FIRST, queue.draw(worker, ask).spans),))
    members.discard(1)
    queue.lost(1)
    assert queue.has_left(members)
    queue.settle(0, (DrawnBatch(FIRST, queue.draw(0, ask).spans),))
    assert queue.draw(0, ask) == Ticket(())
    assert total(queue.unseen()[FIRST]) == 2 and not queue.has_left(members)


@pytest.mark.wide
@settings(max_examples=300, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple),
    length=st.integers(0, 30),
    cuts=st.lists(st.integers(0, 30), max_size=6),
    drop_last=st.booleans(),
    order=st.lists(st.integers(0, 4), max_size=60),
    losses=st.sets(st.integers(0, 4), max_size=2),
    fills=st.booleans(),
    visits=st.none() | st.builds(Visits, st.integers(1, 4), st.integers(1, 3)),
)
def test_every_position_is_done_once_and_everybody_is_served(
    sizes: tuple[int, ...],
    length: int,
    cuts: list[int],
    drop_last: bool,
    order: list[int],
    losses: set[int],
    fills: bool,
    visits: Visits | None,
) -> None:
    ends = sorted({min(c, length) for c in cuts})
    spans = merged(zip(ends[::2], ends[1::2], strict=False)) if cuts else ((0, length),)
    members = set(range(len(sizes)))
    lost = losses & members if len(losses & members) < len(sizes) else set()
    ask = draw(length, sizes, spans=spans, drop_last=drop_last)
    ask = replace(ask, fills=fills, visits=visits)
    queue, done = BatchQueue(members), set()
    trained: list[int] = []
    served: dict[int, list[Ticket]] = {worker: [] for worker in range(len(sizes))}
    for turn, asked in enumerate(order + [w for _ in range(length + 2) for w in range(5)]):
        if turn == 3:
            members -= lost
            for worker in lost:
                queue.lost(worker)
        worker = asked % len(sizes)
        if worker not in members or worker in done:
            continue
        ticket = queue.draw(worker, ask)
        if not ticket.spans:
            done.add(worker)
            continue
        served[worker].append(ticket)
        if ticket.counts:
            assert total(ticket.spans) == sizes[worker] or not drop_last
            trained += positions(ticket.spans)
            queue.settle(worker, (DrawnBatch(LoaderPass(0, 0), ticket.spans),))
    assert done >= members, "everybody's epoch ends"
    assert len(trained) == len(set(trained)), "nothing twice"
    rest = [p for each in queue.unseen().values() for p in positions(each)]
    assert sorted([*trained, *rest]) == list(positions(spans)), "nothing lost"
    if not drop_last and not lost:
        assert not rest, "nothing left out"
    if fills and length >= (min(sizes) if drop_last else 1):
        assert all(served[worker] for worker in members), "everybody takes part"
    if not drop_last and not lost and total(spans):
        assert served[0][0].counts, "the first worker before all others"


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(-2, 60))
def test_spans_are_split_and_joined_without_loss(ends: list[int], n: int) -> None:
    ends = sorted(set(ends))
    spans = tuple(zip(ends[::2], ends[1::2], strict=False))
    head, tail = split(spans, n)
    assert [*positions(head), *positions(tail)] == [*positions(spans)]
    assert total(head) == min(max(n, 0), total(spans))
    assert [*positions(merged([*tail, *head]))] == [*positions(spans)]


# ---- the end of an epoch, where workers are not equally fast ------------------------------------


def ends(steps: list[float], batches: int, ahead: int = 1) -> tuple[list[float], list[int]]:
    """When each worker has nothing left to do, and how many mini-batches it has had.

    ``steps``: seconds for a mini-batch; ``ahead``: how many it draws before it needs them.
    """
    queue, ask = BatchQueue(set(range(len(steps)))), draw(2 * batches, (2,) * len(steps))
    held: list[list[Spans]] = [[] for _ in steps]
    at, counts, running = (
        [0.0] * len(steps),
        [0] * len(steps),
        [(0.0, w) for w in range(len(steps))],
    )
    drawn: list[Spans] = []
    under_way: dict[int, Spans] = {}
    while running:
        running.sort()
        at_s, worker = running.pop(0)
        at[worker] = at_s
        if worker in under_way:
            queue.settle(worker, (DrawnBatch(FIRST, under_way.pop(worker)),))
        while len(held[worker]) <= ahead and (spans := queue.draw(worker, ask).spans):
            held[worker].append(spans)
        if held[worker]:
            under_way[worker] = held[worker].pop(0)
            drawn.append(under_way[worker])
            counts[worker] += 1
            running.append((at_s + steps[worker], worker))
    assert merged([span for spans in drawn for span in spans]) == ((0, 2 * batches),)
    assert sum(counts) == batches, "each once"
    return at, counts


def test_a_slow_worker_does_not_keep_the_others_waiting_for_what_it_has_fetched_ahead() -> None:
    at, counts = ends([1.0, 3.0], 40)
    assert max(at) - min(at) <= 1 and counts == [30, 10], "as good as can be"
    at, _ = ends([1.0, 1.0, 1.0, 3.0], 100)
    assert max(at) - min(at) <= 3 and max(at) <= 100 / (3 + 1 / 3) + 1


def test_what_a_slow_worker_holds_already_counts() -> None:
    at, _ = ends([10.0, 1.0], 50, ahead=2)
    assert max(at) <= 50 / (1 + 1 / 10) + 1


def test_others_are_sooner_only_with_their_last_mini_batch() -> None:
    assert not end_sooner(5.0, 6.0, [1.0, 1.0], 2.0)
    assert end_sooner(5.1, 6.0, [1.0, 1.0], 2.0)


def test_workers_as_fast_as_each_other_share_the_end_as_before() -> None:
    assert ends([1.0] * 4, 40) == ([10.0] * 4, [10] * 4)
    assert ends([1.0] * 3, 10)[1] == [4, 3, 3]


@given(
    st.lists(st.sampled_from([1.0, 1.1, 2.0, 3.0, 10.0]), min_size=1, max_size=5),
    st.integers(1, 60),
    st.integers(0, 4),
)
@settings(max_examples=150, deadline=None)
def test_nothing_is_lost_at_the_end_however_unequal_the_workers_are(
    steps: list[float], batches: int, ahead: int
) -> None:
    at, counts = ends(steps, max(batches, len(steps)), ahead)
    assert min(counts) >= 1, "everybody takes part"
    assert batches < 4 * len(steps) * (2 + ahead) or max(at) - min(at) <= 3 * max(steps)


def test_what_a_worker_steps_itself_is_done_when_it_has_and_goes_back_if_it_never_will() -> None:
    made = {0: 0, 1: 0}
    queue, lap = BatchQueue({0, 1}, covered=made.__getitem__), LoaderPass(0, 0)
    for worker in (0, 1):
        spans = queue.draw(worker, draw(16, (4, 4), begins=True)).spans
        queue.done(worker, StepRequest(0, 4.0, covers=(DrawnBatch(lap, spans),)), 4.0)
    assert total(queue.unseen()[lap]) == 16
    made[0] = 1
    assert total(queue.unseen()[lap]) == 12
    assert queue.lost(1) == 4.0 and queue.lost(0) == 0.0
    assert total(queue.unseen()[lap]) == 12


@pytest.mark.parametrize("n_made", [2, 3])
def test_what_a_worker_has_not_stepped_yet_is_unseen(n_made: int) -> None:
    """Of one push for two mini-batches, and one that is fetched ahead."""
    made = 0
    queue, ask = BatchQueue({0}, covered=lambda worker: made), draw(16, (4,), begins=True)
    tickets = [queue.draw(0, replace(ask, begins=n == 0)) for n in range(3)]
    covers = [DrawnBatch(FIRST, ticket.spans) for ticket in tickets]
    queue.done(0, StepRequest(0, 8.0, covers=tuple(covers[:2])), 8.0)
    assert queue.untold(0) == [] and total(queue.unseen()[FIRST]) == 16
    made = n_made
    assert queue.untold(0) == covers[2:made]
    assert total(queue.unseen()[FIRST]) == 16 - 4 * made


def test_what_has_been_stepped_does_not_go_back_when_a_pass_is_opened_again() -> None:
    made = {0: 0}
    queue, lap = BatchQueue({0}, covered=made.__getitem__), LoaderPass(0, 0)
    spans = queue.draw(0, draw(8, (4,), begins=True)).spans
    queue.done(0, StepRequest(0, 4.0, covers=(DrawnBatch(lap, spans),)), 4.0)
    made[0] = 1
    assert queue.draw(0, draw(8, (4,), begins=True)).spans != spans


# ---- backups: a mini-batch that two workers have -------------------------------------------------


def claims(queue: BatchQueue, worker: int, spans: Spans) -> tuple[bool, list[int]]:
    return queue.claim(worker, DrawnBatch(FIRST, spans))


def backed_up(length: int, workers: int, **options: bool) -> tuple[BatchQueue, Draw, list[Spans]]:
    """The last worker has drawn two mini-batches and done none; the first has done the rest."""
    queue = BatchQueue(set(range(workers)), backs_up=True)
    ask = draw(length, (2,) * workers, **options)
    slow = [queue.draw(workers - 1, ask).spans for _ in range(2)]
    while not queue.is_whole([DrawnBatch(FIRST, spans) for spans in slow]):
        spans = queue.draw(0, ask).spans
        assert claims(queue, 0, spans) == (True, [])
        queue.settle(0, (DrawnBatch(FIRST, spans),))
    return queue, ask, slow


def test_an_idle_worker_gets_what_a_slower_one_has_not_begun_and_then_what_it_has() -> None:
    queue, ask, slow = backed_up(12, 2)
    assert queue.draw(0, ask).spans == slow[1]
    assert queue.draw(0, ask).spans == slow[0]
    assert queue.draw(0, ask).spans == (), "nothing a third time"


def test_the_first_claim_of_a_mini_batch_counts_and_the_other_worker_is_named() -> None:
    queue, ask, slow = backed_up(12, 2)
    queue.draw(0, ask), queue.draw(0, ask)
    assert claims(queue, 0, slow[1]) == (True, [1])
    assert claims(queue, 1, slow[0]) == (True, [0])
    assert claims(queue, 0, slow[0]) == (False, []) == claims(queue, 1, slow[1])
    assert queue.is_whole([DrawnBatch(FIRST, spans) for spans in slow])


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_worker_gives_back_what_nobody_else_processes(lost: int) -> None:
    queue, ask, slow = backed_up(12, 2)
    queue.draw(0, ask)
    assert claims(queue, lost, slow[1])[0]
    queue.members.discard(lost)
    queue.lost(lost)
    left = {0: [slow[1]], 1: slow}[lost]
    drawn = [queue.draw(1 - lost, ask).spans for _ in left]
    assert merged([s for spans in drawn for s in spans]) == merged([s for x in left for s in x])
    assert not claims(queue, lost, slow[1])[0], "it is the other one's now"


def test_a_mini_batch_that_two_workers_have_stays_with_one_where_the_other_is_lost() -> None:
    queue, ask, slow = backed_up(12, 2)
    queue.draw(0, ask)
    queue.members.discard(1)
    queue.lost(1)
    assert claims(queue, 0, slow[1]) == (True, [])
    assert queue.draw(0, ask).spans == slow[0] and queue.draw(0, ask).spans == ()


def test_a_smaller_backup_mini_batch_comes_last_since_a_loader_takes_it_for_the_end() -> None:
    queue, ask, _ = backed_up(12, 2)
    ask = replace(ask, sizes=(3, 2))
    assert total(queue.draw(0, ask).spans) == 2
    assert queue.draw(0, replace(ask, drop_last=True)).spans == ()


def test_no_backup_is_drawn_before_the_speed_of_workers_is_known() -> None:
    queue, ask = BatchQueue({0, 1}, backs_up=True), draw(4, (2, 2))
    assert [queue.draw(worker, ask).spans for worker in (1, 0)] == [((0, 2),), ((2, 4),)]
    assert queue.draw(0, ask).spans == ()
