"""The shared queue of mini-batches: each drawn once, everybody served."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hybridtrain.batch_queue import BatchQueue
from hybridtrain.messages import Draw, Ticket


def test_whoever_asks_gets_the_next_batch_so_the_fast_do_more() -> None:
    queue = BatchQueue({0, 1})
    drawn = [queue.draw(0, Draw(0, 0, 5)).batch for _ in range(5)]
    assert drawn == [0, 1, 2, 3, None], "the last batch is kept for worker 1"
    assert queue.draw(1, Draw(0, 0, 5)) == Ticket(4)
    assert queue.draw(1, Draw(0, 0, 5)) == Ticket(None)


def test_with_fewer_batches_than_workers_those_left_over_run_one_that_does_not_count() -> None:
    queue = BatchQueue({0, 1, 2})
    assert queue.draw(2, Draw(0, 0, 1)) == Ticket(0)
    assert queue.draw(0, Draw(0, 0, 1)) == Ticket(0, counts=False)
    assert queue.draw(1, Draw(0, 0, 1)) == Ticket(0, counts=False)
    assert [queue.draw(w, Draw(0, 0, 1)).batch for w in range(3)] == [None, None, None]


def test_an_epoch_without_batches_ends_at_once() -> None:
    assert BatchQueue({0}).draw(0, Draw(0, 0, 0)) == Ticket(None)


def test_epochs_and_loaders_are_counted_apart() -> None:
    queue = BatchQueue({0})
    assert [queue.draw(0, Draw(0, 0, 1)).batch for _ in range(2)] == [0, None]
    assert queue.draw(0, Draw(0, 1, 1)).batch == 0
    assert queue.draw(0, Draw(1, 0, 1)).batch == 0


def test_no_batch_is_kept_for_a_lost_worker() -> None:
    members = {0, 1}
    queue = BatchQueue(members)
    assert queue.draw(0, Draw(0, 0, 2)).batch == 0
    members.discard(1)
    assert queue.draw(0, Draw(0, 0, 2)).batch == 1


@settings(max_examples=200, deadline=None)
@given(
    n_workers=st.integers(1, 5),
    n_batches=st.integers(0, 12),
    order=st.lists(st.integers(0, 4), max_size=60),
    losses=st.sets(st.integers(0, 4), max_size=2),
)
def test_every_batch_is_drawn_once_and_everybody_is_served(
    n_workers: int, n_batches: int, order: list[int], losses: set[int]
) -> None:
    members = set(range(n_workers))
    lost = losses & members if len(losses & members) < n_workers else set()
    queue, drawn, done = BatchQueue(members), [], set()
    served: dict[int, list[Ticket]] = {worker: [] for worker in range(n_workers)}
    for turn, asked in enumerate(order + [w for _ in range(n_batches + 1) for w in range(5)]):
        if turn == 3:
            members -= lost
        worker = asked % n_workers
        if worker not in members or worker in done:
            continue
        ticket = queue.draw(worker, Draw(0, 0, n_batches))
        if ticket.batch is None:
            done.add(worker)
        else:
            served[worker].append(ticket)
            drawn += [ticket.batch] if ticket.counts else []
    assert done >= members, "everybody's epoch ends"
    assert sorted(drawn) == sorted(set(drawn)), "nothing twice"
    assert set(drawn) <= set(range(n_batches))
    if not lost:
        assert sorted(drawn) == list(range(n_batches)), "nothing left out"
    if n_batches > 0:
        assert all(served[worker] for worker in members), "everybody takes part"
    if n_batches >= n_workers:
        assert all(t.counts for tickets in served.values() for t in tickets)
